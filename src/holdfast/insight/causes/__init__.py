"""What failed and who is to blame: words (what a failure says), blame (who), rules (the table of causes), find (what),
meeting (what only several failures together show), texts (what each code means). Loaded when a generation has failed,
and by `holdfast explain`; nothing of it is needed to start a job.
"""
