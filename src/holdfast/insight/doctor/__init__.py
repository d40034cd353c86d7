"""The doctor's judgement: facts to findings, codes with cause, evidence and fix, and the table for people. No shells."""
