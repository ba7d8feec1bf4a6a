"""What serving engines and accelerators say about a draft, in one vocabulary.

A scrape becomes an `Exposition`, that becomes `Rank`s and `Device`s (one vocabulary for vLLM, SGLang, TokenSpeed,
k3dspark, npu-exporter and DCGM), the changes between scrapes become `Figures`. `Monitor` is the door of watching,
`export.write` that of Prometheus rules, dashboard and runbook. Nothing here imports torch.
"""
