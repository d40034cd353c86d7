"""Imported by a program that trains and compiles nothing: an optimizer would import torch's compiler, which takes as long
as torch itself."""

import sys
import types

import torch

torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
torch._dynamo.graph_break = lambda *_, **__: None
torch._dynamo.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
