"""An OpenAI-compatible HTTP server over the batch engine, with its metrics and its dashboard, and a load generator.

One thread owns the engine; the event loop submits jobs to it, streams their tokens and cancels what nobody waits for.
The doors are `server.serve` and `load.run_load`.
"""
