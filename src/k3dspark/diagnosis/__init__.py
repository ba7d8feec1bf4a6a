"""Why acceptance is low, and which test decides.

From metrics: `shapes.recognise` takes `Evidence` (figures of a monitor and responses with their acceptance) and names
the shapes it sees, each with likely causes in order. This half is pure functions and imports no torch.
By experiment: `experiment.experiment` replays a draft on recorded answers of its target with one thing changed at a
time (`changes.CHANGES`), and says which change surely restores acceptance.
"""
