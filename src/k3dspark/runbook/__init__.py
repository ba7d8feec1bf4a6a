"""The founding checklist as one run, from the files to the metrics, and what differs between two runs.

Every step leaves its outcome in an archive directory as soon as it is done, so a run that was killed goes on where it
stopped, and two archives can be compared. The doors are `run.run` and `diff.differences`.
"""
