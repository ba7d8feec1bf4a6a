"""Whether two generators say the same: a candidate held against a baseline, token by token and draw by draw.

A generator is a local engine or any OpenAI-compatible server. `run.accept` asks both for the same answers, asks the
baseline twice so that its own variance is known, and hands what differs to `classify`. The door is `run.accept`;
nothing that talks to a server imports torch.
"""
