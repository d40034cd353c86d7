"""Hangs: when no rank makes progress, where are all ranks, and for which one do the others wait?"""
