"""The runbook in English."""

from __future__ import annotations

from typing import Final

from k3dspark.monitoring.runbook import Entry

LABELS: Final = {
    "title": "Runbook of the DSpark alerts",
    "intro": "Written by `k3dspark monitor export`. Output stays correct under all of these alerts unless an entry says "
    "otherwise: a bad draft costs time, not quality. `k3dspark diagnose --url http://HOST:PORT` names causes from the "
    "same figures.",
    "severity": "Severity",
    "wait": "after",
    "critical": "critical",
    "warning": "warning",
    "info": "information",
    "first": "First:",
    "cause": "cause, the likeliest first",
    "test": "what decides",
}

_DIAGNOSE: Final = "`k3dspark diagnose --url http://HOST:PORT`"
_INSPECT: Final = "`k3dspark inspect DRAFT --target TARGET`"

ENTRIES: Final = {
    "DSparkNothingAccepted": Entry(
        "Drafts are made and verified, and not one token of them is kept: every round brings the target's own token only. "
        "Decoding is slower than without a draft.",
        f"turn speculation off if latency matters now, then run {_INSPECT} and {_DIAGNOSE}.",
        (
            ("weights that were never loaded: LFS pointers, dummy weights, random initialisation", f"{_INSPECT} and the engine's load log"),
            ("the draft belongs to another target, or vocabularies differ", "token ids and rows of the embedding in the same report"),
            ("slots read one early (speculators convention), or a wrong model class", "the architecture name in the engine's log; the engine's version"),
            ("taps of wrong layers or of the wrong stream", "compare the engine's tap indices with `target_layer_ids` plus one; VLLM_KIMI_K3_AUX_ATTN_RES_STREAM unset for the MLA draft"),
        ),
    ),
    "DSparkAcceptanceLow": Entry(
        "Acceptance is far below what this workload usually reaches, and the shape over slots is an ordinary one: the draft "
        "still knows the target, but worse.",
        f"see whether the traffic changed (languages, prompt length, temperature); then {_DIAGNOSE}.",
        (
            ("other traffic: another language or domain, longer prompts, a higher temperature", "acceptance by prompt length on saved responses: `k3dspark diagnose --requests FILE`"),
            ("the layer map, or the tap stream, is not the one of training", "`target_layer_ids` against the engine's log; both streams have one shape, so only acceptance tells"),
            ("precision: a quantised target or draft, an 8-bit cache", "the same prompts in bf16"),
            ("YaRN of the draft lost (scale 0.0722 instead of 0.1309 at K3 geometry)", f"the figures of `k3dspark explain DRAFT`; {_INSPECT}"),
            ("draft cache not filled for prefixes from the prefix cache", "the same prompts with prefix caching off"),
        ),
    ),
    "DSparkBelowBreakEven": Entry(
        "Tokens are accepted, but a round takes longer than the plain steps it replaces: without the draft the service would "
        "be faster at this load.",
        "compare the time of a round with the plain step given to `monitor export`: is that figure still right at this load?",
        (
            ("too many draft tokens for this load: verification of large batches is not free", "fewer draft tokens, or a table by batch size (`num_speculative_tokens_per_batch_size`)"),
            ("drafting or verification runs outside the graph", "the engine's log: eager mode, graph sizes that do not cover batch × (K + 1)"),
            ("hidden states travel over a slow link", "`k3dspark check` on bandwidth between nodes"),
            ("mixture of experts at batch one: more rows wake more experts", "the same at a higher concurrency"),
        ),
    ),
    "DSparkNotDrafting": Entry(
        "Tokens are generated and no round is counted: the engine decodes without the draft.",
        "look for the speculative configuration in the engine's start-up log.",
        (
            ("started without a speculative configuration, or on another node with another command", "the command line; `k3dspark launch` writes it"),
            ("speculation switched itself off: batch above a limit, a request option that is not supported", "acceptance at concurrency 1"),
            ("a plain server is scraped under the same service name", "the targets in prometheus.yml"),
            ("statistics are off", "whether /metrics has spec_decode families at all"),
        ),
    ),
    "DSparkRanksDiverge": Entry(
        "Ranks of one model serve the same traffic and accept differently: something about one of them is different.",
        "find the rank in `dspark:rank_acceptance_length:5m`, then compare its node with a good one.",
        (
            ("one node has other weights or another configuration", "`k3dspark inspect DRAFT --verify` on both nodes"),
            ("other software there: driver, CANN, engine", "`k3dspark check --json` on both, compared"),
            ("a routing policy sends different traffic there", "prompt lengths and prefix hits of the ranks"),
            ("a faulty device that computes wrongly", "`k3dspark accept` against that rank: here output may be wrong, too"),
        ),
    ),
    "DSparkCollapseAfterFirstSlot": Entry(
        "The first draft token is good and everything after it is not: the target's state arrives, what is done inside the "
        "block does not.",
        f"{_DIAGNOSE}; the fault lies in the block, not in the taps.",
        (
            ("a causal mask on a block that was trained to see both ways, or the reverse", "the draft's `block_causal` against the engine's version"),
            ("the Markov head missing, transposed or fed with the wrong token", "`markov_head` tensors in the load log"),
            ("mask token id or positions inside the block wrong", f"{_INSPECT}: mask_token_id"),
        ),
    ),
    "DSparkLateSlotCollapse": Entry(
        "A later slot is suddenly worse than the one before it, although acceptance inside a block normally changes smoothly.",
        "which slot it is, in `dspark:slot_conditional:5m`.",
        (
            ("the block is read past what was trained: that slot was never trained", "`block_size` of config.json against the engine's number of draft tokens"),
            ("adaptive verification cuts there, so that few rounds reach the slot", "verified lengths; turn adaptation off for a test"),
            ("a kernel handles only so many query rows", "one draft token fewer"),
        ),
    ),
    "DSparkFewerSlots": Entry(
        "Fewer draft tokens are proposed than the draft was trained for: the last ones, which cost almost nothing to draft, "
        "are given away.",
        "the number in the engine's command.",
        (
            ("width and proposals mixed up: 7 given where the engine wants anchor + 7 = 8", "SGLang and TokenSpeed take the verify width, vLLM the proposals"),
            ("chosen on purpose for this load", "`k3dspark monitor export --block N` makes that the expectation"),
        ),
    ),
    "DSparkMoreSlots": Entry(
        "More draft tokens are proposed than the draft was trained for: the surplus is noise that must be verified.",
        "the number in the engine's command.",
        (
            ("width and proposals mixed up: 8 given where the engine wants 7 proposals", "vLLM takes the proposals, SGLang and TokenSpeed the verify width"),
            ("a draft with a smaller block was put in", "`block_size` in its config.json"),
        ),
    ),
    "DSparkSlotsDoNotAddUp": Entry(
        "The sum over slots must be the acceptance length minus one and is not: the figures by slot miss some ranks. Trust "
        "the total, not the slots.",
        "the number of ranks that export per-slot counters.",
        (
            ("the engine counts slots of one data-parallel rank only", "data parallelism 1; a newer engine"),
            ("one rank has another block size", "slots by instance"),
        ),
    ),
    "DSparkScrapeFailing": Entry(
        "This address does not answer. Nothing else can be said about it meanwhile, and no other alert will speak for it.",
        "is the process alive? `curl http://HOST:PORT/metrics` from the Prometheus machine.",
        (
            ("the engine died or still loads", "its log; the process"),
            ("port, firewall or a changed address", "curl from the node itself, then from here"),
            ("SGLang without --enable-metrics", "HTTP 404"),
        ),
    ),
    "DSparkFamilyMissing": Entry(
        "The engine answers scrapes, but under no name that these rules know: they are blind to it.",
        "`k3dspark monitor HOST:PORT --once` lists what is missing.",
        (
            ("statistics are switched off (--disable-log-stats)", "the engine's command line"),
            ("a version that renamed families", "the names in /metrics; a newer `k3dspark`"),
            ("it is no engine: a proxy or router", "what /metrics holds"),
        ),
    ),
    "DSparkEngineRestarted": Entry(
        "Counters fell: the process began anew within the last quarter of an hour. Its graphs and caches are cold.",
        "the last lines of the log before the restart.",
        (
            ("out of device memory, above all with long contexts", "the log; `k3dspark plan`"),
            ("a device or driver fault", "DSparkDeviceFault; dmesg; the driver's log"),
            ("somebody restarted it", "the service manager's log"),
        ),
    ),
    "DSparkIdleWhileQueued": Entry(
        "Requests wait while devices are mostly idle: something other than computing holds the engine up.",
        "cache use and preemptions on the same node.",
        (
            ("no cache blocks left: requests wait for memory", "cache use near 100 %; `k3dspark plan`"),
            ("the host is the limit: one busy Python thread, no CPU binding", "CPU use of the engine process"),
            ("ranks wait for the slowest one, or for a link", "utilisation by device; `k3dspark check` on links"),
            ("a limit on running requests below what fits", "--max-num-seqs against running requests"),
        ),
    ),
    "DSparkDeviceFault": Entry(
        "A device reports that it is not healthy. What it computes cannot be trusted: this alert is about correctness, too.",
        "take the node out of service.",
        (
            ("hardware or driver fault", "`npu-smi info -t health`, `nvidia-smi -q`, dmesg"),
            ("overheating", "its temperature"),
        ),
    ),
}  # fmt: skip
