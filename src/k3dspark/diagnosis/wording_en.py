"""The diagnosis in English: each shape's title and evidence, each cause with the test that decides it."""

from __future__ import annotations

from typing import Final

LABELS: Final = {
    "nothing": "nothing wrong found",
    "nothing_judged": "no verdict: there is too little evidence",
    "causes": "likely causes, in order",
    "test": "decides",
    "unjudged": "not judged",
}
COLUMNS: Final = ("", "cause", "what decides")

SHAPES: Final = {
    "not_drafting": ("Tokens, but no drafting", "{tokens:,.0f} tokens in the window and not one draft token"),
    "exactly_one": ("Nothing is accepted", "acceptance length {length:.3f}"),
    "fewer_proposals": (
        "Fewer proposals than trained",
        "{number:.0f} draft tokens a round; the draft was trained for {block:.0f}",
    ),
    "more_proposals": (
        "More proposals than trained",
        "{number:.0f} draft tokens a round; the draft was trained for {block:.0f}",
    ),
    "collapse_after_first": (
        "The first slot is fine, then it collapses",
        "slot 1 is kept in {first:.0%} of rounds, slot 2 in {second:.0%} of those",
    ),
    "collapse_at_slot": (
        "Collapse at one slot",
        "slot {slot:.0f} is kept in {share:.0%} of the rounds that kept the one before; up to there it was {before:.0%}",
    ),
    "all_slots_low": (
        "All slots are low",
        "acceptance length {length:.2f} where {expected:.2f} is expected, and no slot stands out",
    ),
    "below_break_even": (
        "Accepted, but not enough to pay",
        "acceptance length {length:.2f}, break-even {break_even:.2f} ({basis}): without the draft this load would be faster",
    ),
    "dead_beyond": (
        "Good at short contexts and dead beyond",
        "length {before:.2f} below {at:,.0f} tokens of context, {after:.2f} from there on",
    ),
    "falls_with_context": (
        "Falls with the context",
        "length {short:.2f} below {until:,.0f} tokens of context, {long:.2f} from {beyond:,.0f} on",
    ),
    "warm_worse": (
        "Warm prefixes are worse than cold ones",
        "at like context, length {cold:.2f} with a cold prefix cache and {warm:.2f} with a warm one",
    ),
    "ranks_differ": ("Ranks differ", "{low:.2f} on {low_name}, {high:.2f} on {high_name}"),
    "slots_do_not_add_up": (
        "The figures by slot miss something",
        "1 + the sum of slots is {slots:.2f}, the acceptance length {length:.2f}; trust the latter",
    ),
}

CAUSES: Final = {
    "no_configuration": (
        "the engine was started without a speculative configuration",
        "its command line and start-up log",
    ),
    "switched_off": (
        "speculation switched itself off: batch above a limit, a request option it does not support",
        "one plain greedy request at concurrency 1",
    ),
    "plain_server": ("this is a server without a draft", "which address was asked"),
    "statistics_off": (
        "speculative statistics are not exported",
        "spec_decode families in /metrics; draft fields in responses",
    ),
    "not_loaded": (
        "the draft's weights were not loaded: LFS pointers, dummy format, skipped names",
        "k3dspark inspect DRAFT --verify; the engine's load log",
    ),
    "slots_read_early": (
        "slots are read one early (speculators convention), or a generic architecture name chose the wrong class",
        "the architecture in the engine's log; a newer engine",
    ),
    "wrong_pair": (
        "the draft was made for another target, or a vocabulary or special tokens differ",
        "k3dspark inspect DRAFT --target TARGET",
    ),
    "wrong_taps": (
        "taps come from wrong layers (one early or one late), or in another order",
        "the engine's indices must be target_layer_ids + 1 in vLLM; then draft against target on captured taps",
    ),
    "wrong_stream": (
        "taps come from the wrong stream (prefix sum against AttnRes mixture); the shape is the same",
        "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM set and unset, acceptance compared",
    ),
    "sampler": (
        "the sampler rejects everything: sampled requests without draft probabilities, or a faulty kernel",
        "the same prompts greedily",
    ),
    "width_given_as_proposals": (
        "7 was given where the verify width 8 (anchor + 7) is asked for",
        "vLLM takes the number of proposals, SGLang and TokenSpeed the width",
    ),
    "chosen": ("it was chosen for this load", "--block N makes it the expectation"),
    "proposals_given_as_width": (
        "the verify width 8 was given where 7 proposals are asked for",
        "vLLM takes the number of proposals, SGLang and TokenSpeed the width",
    ),
    "smaller_block": ("this draft's block is smaller", "block_size in its config.json"),
    "mask_shape": (
        "a causal mask on a block trained to see both ways, or the reverse",
        "the draft's block_causal against what the engine's version does",
    ),
    "markov": (
        "the Markov head is missing, transposed, or fed with the wrong token",
        "markov_head tensors in the load log",
    ),
    "mask_token": (
        "the mask token id is wrong",
        "mask_token_id against the tokenizer: k3dspark inspect DRAFT --target TARGET",
    ),
    "block_positions": (
        "positions inside the block do not go on from the context",
        "draft against target on captured taps",
    ),
    "beyond_block": ("this slot lies past the block that was trained", "block_size in config.json"),
    "cut_by_adaptation": ("adaptive verification cuts there", "the same with adaptation off"),
    "query_rows": ("a kernel handles only so many query rows", "one draft token fewer; another attention backend"),
    "traffic": (
        "the traffic is harder than the expectation: language, domain, temperature",
        "k3dspark monitor while a known prompt set runs greedily",
    ),
    "yarn_scale": (
        "the draft's YaRN scale is lost: softmax scale 0.0722 instead of 0.1309 at K3 geometry",
        "k3dspark explain DRAFT; mscale_all_dim in what the engine read",
    ),
    "precision": (
        "precision: a quantised target or draft, an 8-bit cache of the draft",
        "the same prompts with bf16 weights and cache",
    ),
    "too_many_tokens": (
        "too many draft tokens for this batch size",
        "fewer, or a table by batch size; k3dspark monitor --plain-step-ms at each",
    ),
    "no_graph": (
        "drafting or verification runs eagerly",
        "the engine's log: enforce_eager, graph sizes that miss batch × (K + 1)",
    ),
    "slow_link": ("hidden states cross a slow link every round", "k3dspark check on links"),
    "experts_at_one": ("at batch one more rows wake more experts", "the same at higher concurrency"),
    "draft_limit": (
        "a limit for the draft alone: its max_model_len, its cache, a position table",
        "max_model_len in the speculative configuration",
    ),
    "yarn_missing": (
        "YaRN is not applied in the draft, or with another factor than the target's",
        "rope_parameters of both: k3dspark inspect DRAFT --target TARGET",
    ),
    "prefix_rows": (
        "context restored from the prefix cache has no rows in the draft's cache",
        "the same prompts with prefix caching off (vLLM: --no-enable-prefix-caching)",
    ),
    "not_trained_long": (
        "the draft was never trained on such contexts",
        "five prompts a length on another engine: if the curve is the same, it is the draft's",
    ),
    "index_cache": (
        "an index cache of the engine does not work together with the draft",
        "the same with that cache off",
    ),
    "node_weights": ("one node has other weights or another configuration", "k3dspark inspect DRAFT --verify on both"),
    "node_software": ("one node has another driver, toolkit or engine", "k3dspark check --json on both, compared"),
    "routing": ("the ranks see different traffic", "prompt lengths and prefix hits by rank"),
    "device_fault": ("a device computes wrongly", "the device's health; token-by-token comparison against that rank"),
    "rank_slots_uncounted": (
        "the engine counts slots of some data-parallel ranks only",
        "data parallelism 1, or a newer engine",
    ),
}

UNJUDGED: Final = {
    "too_few_rounds": "acceptance: fewer than 200 rounds were seen; watch longer (--interval)",
    "no_slots": "the shape over slots: this engine does not count by slot",
    "no_break_even": "whether drafting pays: give --plain-step-ms or --plain URL",
    "no_context_lengths": "context length: give responses of different lengths (--requests FILE)",
    "no_warm_and_cold": "the prefix cache: give responses with and without cached tokens (--requests FILE)",
    "one_rank": "differences between ranks: there is one",
}

# -- by experiment ---------------------------------------------------------------------------------------------------

VERDICTS: Final = {
    "cause_found": "cause found",
    "nothing_wrong": "nothing wrong found",
    "unexplained": "acceptance is dead, and none of these changes is the cause",
}
EXPERIMENT: Final = {
    "summary": "acceptance length {length:.2f} over {anchors:,} blocks of {prompts} answers of {target}",
    "with_change": "with it: {length:.2f} ({low:+.2f} to {high:+.2f})",
    "judged": "judged",
    "not_tried": "not tried",
    "context_unused": "the draft makes as much of taps of zeros: it does not read the target",
}
EXPERIMENT_COLUMNS: Final = ("change", "with", "gain, nats a token", "acceptance length", "gain", "restores")
YES_NO: Final = ("no", "yes")

# What is wrong when the change restores acceptance, and what to do about it.
CHANGES: Final = {
    "taps_early": (
        "your taps are one layer early",
        "take each tap one layer later: the ids of config.json are 0-based layers whose output is tapped (vLLM counts from one more)",
    ),
    "taps_late": (
        "your taps are one layer late",
        "take each tap one layer earlier: ids of an engine that counts from one do not belong in config.json",
    ),
    "one_tap": ("one of your taps is a layer off", "correct that one of target_layer_ids"),
    "tap_order": (
        "your taps arrive in another order than the draft learnt",
        "concatenate them in ascending order of layers; or the columns of context_proj were converted wrongly",
    ),
    "tap_stream": (
        "your taps come from the other stream of the target",
        "set aux_hidden_stream, and in vLLM VLLM_KIMI_K3_AUX_ATTN_RES_STREAM, to the stream given here",
    ),
    "positions_low": (
        "positions of the block are one too low",
        "slot 0 stands at the anchor's position, which is the number of context rows",
    ),
    "positions_high": (
        "positions of the block are one too high",
        "slot 0 stands at the anchor's position, which is the number of context rows",
    ),
    "yarn_missing": ("YaRN is off, and the draft was trained with it", "restore rope_parameters from the source"),
    "yarn_surplus": ("YaRN is on, and the draft was trained without it", "restore rope_parameters from the source"),
    "yarn_scale": (
        "the scale of YaRN is not that of training",
        "restore mscale and mscale_all_dim (published: 1.0 and 1.0); apply the scale once, in the softmax",
    ),
    "rope_layout": (
        "rotary rows lie in the other layout",
        "rotate pairs (2i, 2i+1), or convert the rotary rows of q_b_proj and kv_a_proj_with_mqa back",
    ),
    "rope_theta": ("rope_theta is not that of training", "restore rope_theta from the source"),
    "markov_wrong": (
        "the Markov head does harm: it belongs to another draft or another vocabulary",
        "fetch markov_head again; check the order of the draft vocabulary (d2t)",
    ),
    "markov_transposed": (
        "markov_w1 and markov_w2 are exchanged",
        "exchange them: w1 is read by token, w2 gives the bias",
    ),
    "block_mask": (
        "the mask inside the block is not that of training",
        "set block_causal as given here, and see what the engine's version does",
    ),
    "lm_head": ("the draft's lm_head is not the target's", "leave lm_head.safetensors out, or fetch it again"),
    "embedding": ("the draft's embedding is not the target's", "leave embed_tokens out, or fetch it again"),
    "mask_token": ("mask_token_id is not that of training", "restore mask_token_id from the source"),
    "dtype": ("the draft loses acceptance to rounding", "run the draft in a wider format"),
}
NOT_TRIED: Final = {
    "no_such_layer": "a layer would lie outside the target",
    "one_tap": "there is one tap",
    "one_stream": "the target has one stream",
    "has_yarn": "YaRN is on",
    "no_yarn": "YaRN is off",
    "markov_is_zero": "the Markov head is zero already",
    "other_width": "the target's has another width",
    "is_the_targets": "it is the target's already",
    "is_fp32": "it runs in float32 already",
    "nothing_else": "there is nothing else to try",
}
