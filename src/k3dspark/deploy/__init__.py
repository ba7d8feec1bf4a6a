"""Everything around serving engines that this project does not write itself: what a cluster must have, what fits in
its memory, the files that start vLLM, vLLM-Ascend or SGLang there, and running them. Imports `checkpoint` only and
never torch, so that it works on a login node. The doors are `engines.ENGINES`, `memory.plan_memory`,
`files.write_launch_files`, `launch.Launch` and `tuning.tune`.
"""
