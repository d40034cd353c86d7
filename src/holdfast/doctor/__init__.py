"""What the doctor concludes: from facts to findings, what each code means, and how findings are shown. No shells."""
