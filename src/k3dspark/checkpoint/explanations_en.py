"""What each field of config.json means, what it decides, and what breaks when it is wrong."""

from __future__ import annotations

from typing import Final

SECTIONS: Final[dict[str, str]] = {
    "architecture": "Basic architecture",
    "attention": "MLA attention",
    "positions": "RoPE and YaRN: the million-token context",
    "target": "Alignment with the target",
    "heads": "Markov head and confidence head",
    "tokens": "Special tokens and vocabularies",
    "metadata": "Metadata",
    "switches": "Switches (not stated in the published file; their defaults hold)",
}

FIELDS: Final[dict[str, tuple[str, str, str]]] = {
    "architectures": (
        "Class name of the model, by which an engine finds its implementation.",
        "Which class the engine loads: K3DSparkModel.",
        "“K3DSparkModel is not defined” means that the engine is too old for this architecture: upgrade it. Absent, it "
        "is taken as K3DSparkModel, though some engines want it stated; a generic name is routed to another class.",
    ),
    "model_type": (
        "Identifier of the kind of model, by which transformers and engines choose a config class.",
        "By which rules this file is read.",
        "Anything but k3_dspark is another kind of draft, and is refused here.",
    ),
    "hidden_size": (
        "Width of the hidden state, the feature vector of each token.",
        "One side of nearly every tensor, and the width of lm_head and embedding: the lm_head file weighs vocabulary × "
        "hidden size × 2 bytes + its header.",
        "Shapes disagree and strict loading fails; a draft of another width than its target cannot share embedding and "
        "lm_head with it.",
    ),
    "intermediate_size": (
        "Inner width of the feed-forward network, the other side of SwiGLU's gate, up and down matrices.",
        "Most of each layer's parameters and work; exactly twice the hidden size in the published model.",
        "The shapes of the mlp tensors disagree.",
    ),
    "num_hidden_layers": (
        "Layers of the draft. Few of them on purpose: in speculative decoding the draft must be very fast to save the "
        "target time.",
        "The time of one draft pass, the size of the weights, and the rows per token in the context cache.",
        "One layer too many or too few in the config is twelve tensors missing or surplus.",
    ),
    "num_attention_heads": (
        "Number of attention (query) heads.",
        "Shapes of q_b_proj, kv_b_proj and o_proj. Each head owns consecutive rows, the unrotated first.",
        "Shapes disagree; where they happen to fit but heads are laid out otherwise, it loads, runs and is noise.",
    ),
    "num_key_value_heads": (
        "Number of key/value heads, the same as query heads: MLA compresses through a low-rank latent, not by having "
        "fewer heads (GQA).",
        "No tensor by itself; it declares that this is no GQA draft.",
        "Unequal to num_attention_heads it is another network, such as RadixArk's 64/16 GQA draft, not run here.",
    ),
    "vocab_size": (
        "Size of the vocabulary, about 160,000 tokens in the published model.",
        "Rows of the embedding, markov_w1 and lm_head; must agree with the target id by id.",
        "Unlike the target's, token ids mean other tokens; rows out of order in lm_head make every output wrong.",
    ),
    "rms_norm_eps": (
        "The small term that keeps RMSNorm from dividing by zero.",
        "Numerics of every norm, those of q_a and kv_a included; variance is taken in fp32.",
        "Another default (1e-6) runs all the same, differs from training and costs up to 2 % of acceptance.",
    ),
    "q_lora_rank": (
        "Width to which queries are compressed and normalised before they are spread over all heads.",
        "Output width of q_a_proj and input width of q_b_proj.",
        "Shapes disagree; null (no compression) is refused by vLLM and here.",
    ),
    "kv_lora_rank": (
        "Width of the compressed keys and values: the cache holds this latent and the rotated key for each token and "
        "layer. A plain multi-head cache grows with 2 × heads × head width × length; MLA's low-rank latent saves most "
        "of that at long contexts, which is where MLA has its name from.",
        "Size of the KV cache; width of absorbed attention, kv_lora_rank + qk_rope_head_dim.",
        "Shapes of kv_a and kv_b disagree; an engine's MLA operator often supports 512 + 64 only.",
    ),
    "qk_nope_head_dim": (
        "Width of the part of each query and key head that is not rotated (NoPE).",
        "With qk_rope_head_dim it makes 192, and the softmax scale is that sum to the power −1/2, in the absorbed form "
        "too (never 576).",
        "A wrong scale loads, runs and loses acceptance.",
    ),
    "qk_rope_head_dim": (
        "Width of the part of each query and key head that rotary positions turn; all heads share the key's.",
        "How many numbers are rotated; must be even. Rotation is interleaved: numbers 2i and 2i+1 are a pair.",
        "Rotated by halves (NeoX), position 0 is right and it gets worse with distance.",
    ),
    "v_head_dim": (
        "Width of each value head.",
        "The later rows of each head in kv_b_proj, and the input width of o_proj.",
        "Shapes disagree; with key rows and value rows exchanged the output is noise.",
    ),
    "mla_use_nope": (
        "Variant switch: true keeps the rotary dimensions but does not rotate them, as in Kimi K3 itself. The draft "
        "has false: it rotates.",
        "Whether the draft's attention knows positions.",
        "Shapes are the same either way, so a wrong value is silent: it loads, runs, and acceptance collapses. vLLM "
        "and this project refuse true.",
    ),
    "mla_use_output_gate": (
        "Variant switch: true adds a g_proj to each layer, whose sigmoid gates the attention output, as in Kimi K3 "
        "itself. The draft has false.",
        "Whether each layer has a g_proj tensor.",
        "True without g_proj is missing tensors; vLLM and this project refuse true.",
    ),
    "max_position_embeddings": (
        "Longest context in tokens; a million (1048576) in the published model.",
        "The limit of positions, and YaRN's extended window: it should be factor × original_max_position_embeddings.",
        "Smaller cuts early; larger does not make the model support more. In public tests acceptance drops clearly "
        "beyond some 100,000 tokens.",
    ),
    "rope_theta": (
        "Base frequency of rotary positions.",
        "The rate of each pair of dimensions; stated at the top and in rope_parameters, and both must be the same.",
        "Fallen back to the default 10000 it loads and runs, with every distant position misplaced.",
    ),
    "rope_parameters": (
        "The block of rotary settings, the eight fields below. Older files call it rope_scaling, and rope_type type.",
        "Everything about positions; must be as in training, and as the target's deployment has agreed.",
        "When long contexts turn bad suddenly, look at factor and original_max_position_embeddings first.",
    ),
    "rope_parameters.rope_type": (
        "How the context is extended: yarn is YaRN, default plain rotary positions.",
        "Whether frequencies are interpolated YaRN's way, and the softmax scale carries the square of mscale.",
        "With YaRN ignored short texts hardly show it, and it gets worse with length.",
    ),
    "rope_parameters.rope_theta": (
        "The same base frequency as rope_theta at the top.",
        "Newer engines read it here, older ones at the top.",
        "Two values make two engines rotate differently.",
    ),
    "rope_parameters.factor": (
        "How many times the native length is stretched: 32768 × 32 = 1048576 in the published model.",
        "How far slow dimensions are interpolated, and mscale's value 0.1·ln(factor) + 1.",
        "16 instead of 32 changes frequencies and softmax scale; it loads, runs, and acceptance falls with length.",
    ),
    "rope_parameters.original_max_position_embeddings": (
        "Context length before stretching: natively 32K; YaRN extends it smoothly to 1M at a small loss in precision.",
        "Which dimensions are extrapolated and which interpolated.",
        "The border moves, and positions of long texts are misplaced.",
    ),
    "rope_parameters.beta_fast": (
        "The fast end of YaRN's ramp: dimensions that turn faster are not interpolated.",
        "Where the ramp begins (pair 15 in the published model).",
        "The ramp moves, and middle distances are slightly off.",
    ),
    "rope_parameters.beta_slow": (
        "The slow end of YaRN's ramp: dimensions that turn slower are interpolated fully.",
        "Where the ramp ends (pair 26 in the published model).",
        "The ramp moves; at or above beta_fast it runs backwards.",
    ),
    "rope_parameters.mscale": (
        "First of YaRN's two attention factors: over mscale_all_dim's it gives the multiplier of the cos/sin table.",
        "That multiplier; with both the same it is 1.",
        "Lost, engines take different defaults, and the rotated part is scaled while the other is not.",
    ),
    "rope_parameters.mscale_all_dim": (
        "Second of YaRN's two attention factors: its square goes into the softmax scale.",
        "Softmax scale σ = 192^(−1/2) · m². Apply it once, in σ or on q, never in both.",
        "Lost in a conversion, generic code takes 0: σ becomes 0.0722 instead of 0.1309 and the cos/sin multiplier "
        "1.3466; it loads, runs, and is wrong.",
    ),
    "num_target_layers": (
        "From how many layers of the target hidden states are taken.",
        "Input width of context_proj: one block of columns for each tapped layer.",
        "It must be the number of target_layer_ids.",
    ),
    "target_hidden_size": (
        "Width of the target's hidden state; the published draft is as wide.",
        "Width of each column block of context_proj, and the bytes of hidden state carried for each verified token.",
        "Unlike the target's, its hidden states do not fit in.",
    ),
    "target_num_hidden_layers": (
        "Layers of the target, 93 in Kimi K3.",
        "The range that target_layer_ids may name.",
        "Unlike the target's, this target is not the one of training.",
    ),
    "target_layer_ids": (
        "The wiring of speculative decoding: the draft does not work alone, it reads the hidden states that these "
        "layers (0-based) of the target put out, concatenated in ascending order. They are not evenly spaced: an "
        "early one, some in the middle and one near the end carry meaning and output features both, so that a few "
        "layers can reach high acceptance. All enter context_proj together; they do not pair up with draft layers.",
        "All the context the draft sees. Drafts of Inferact's lineage take AttnRes' raw prefix sum; vLLM's own numbers "
        "are one higher, and vLLM adds the one itself.",
        "One layer off, acceptance drops from over 50 % to 3–10 %; out of order, to nearly nothing. Look here first "
        "when acceptance is low.",
    ),
    "mask_token_id": (
        "The mask token, a reserved, unused id: it fills every slot of a draft block but the first (the anchor).",
        "The embedding row that slots from the second on start from.",
        "Another id (163605, 163824, pad) leaves only the first drafted token right; the later ones lose acceptance.",
    ),
    "bos_token_id": (
        "Token that begins a text.",
        "Not used in the draft's own computation; must agree with the target's tokenizer.",
        "A difference means a wrong tokenizer or target.",
    ),
    "eos_token_id": (
        "Token that ends a text; in Kimi K3's chat it is 163586 (<|end_of_msg|>), not 163585 ([EOS]).",
        "Where generation stops; one id or a list.",
        "Generation does not stop, or too early; drafted tokens after a stop token are to be discarded.",
    ),
    "pad_token_id": (
        "Token that pads a batch.",
        "Alignment in batches; not used in the draft's own computation.",
        "It should not be the mask token.",
    ),
    "draft_vocab_size": (
        "Size of the draft's own vocabulary, the same as the target's in the published model.",
        "Rows of markov_w2 and of the draft's logits. Where smaller, the file has d2t, each one's target id.",
        "Larger than vocab_size makes no sense; different without d2t is an error. vLLM accepts equality only.",
    ),
    "tie_word_embeddings": (
        "Whether embedding and output layer are one matrix. False: they are not, which is why lm_head is stored apart "
        "in lm_head.safetensors.",
        "Which matrix the output layer is. With false both weight files are needed (unless the engine takes the "
        "target's lm_head).",
        "“Vocabulary projection missing” means: load lm_head.safetensors, too. True by mistake takes the embedding as "
        "output layer, and every drafted token is wrong.",
    ),
    "markov_rank": (
        "Low-rank width of the Markov head.",
        "Width of markov_w1 and markov_w2: bias = W2·W1[previous token], which reads all of W2 at each step. It "
        "decides acceptance and drafting time directly.",
        "Shapes disagree; W1 and W2 have one shape, so exchanging them raises no error and makes every slot worse.",
    ),
    "markov_head_type": (
        "Kind of Markov head: vanilla, the standard one, approximates “the next token depends on the last” by a "
        "first-order chain, at little cost and well suited to frequent word pairs; gated adds a gate, rnn a state.",
        "Whether the file has gate_proj or joint_proj, and what each step of the drafting loop computes.",
        "A kind that the weights are not of is missing tensors. In the paper rnn is a little better in long blocks.",
    ),
    "enable_confidence_head": (
        "Whether there is a confidence head, which estimates for each drafted token the probability that the target "
        "accepts it.",
        "Whether the length of speculation can follow confidence: verify more when it is high, fewer when low, for "
        "steadier throughput. Recommended in production.",
        "True without confidence_head tensors is missing tensors. The K3 modules of vLLM, TokenSpeed and ATOM drop the "
        "head and always verify the whole block.",
    ),
    "confidence_head_with_markov": (
        "Whether the confidence head works together with the Markov head: its input is the final-normed hidden state, "
        "then the W1 row of the previous token.",
        "Input width of confidence_head.proj: hidden_size + markov_rank, or hidden_size alone.",
        "A wrong order or width spoils scheduling, never correctness.",
    ),
    "torch_dtype": (
        "Format of the weights: bfloat16, which suits modern GPUs and NPUs. Newer files call it dtype.",
        "How tensors are stored and computed; check first that NPU or GPU and driver support bfloat16.",
        "Unlike the files' own dtype, the config was changed. float16 overflows or loses precision; acceptance also "
        "moves when quantisation or precision does.",
    ),
    "_torchspec_version": (
        "Version of TorchSpec, PyTorch's tool chain for speculative decoding, that converted the model.",
        "Names with a leading underscore are metadata and take no part in inference; useful for tracing an origin.",
        "Nothing; it is kept as it is.",
    ),
    "_converted_from": (
        "Path of the training checkpoint that the model was converted from.",
        "Metadata, no part of inference; it records which checkpoint these weights are.",
        "Nothing; it is kept as it is.",
    ),
    "hidden_act": (
        "Activation of the feed-forward network; silu (SwiGLU) when absent.",
        "What each layer's MLP computes.",
        "situ, inherited from the target, runs and is not what was trained; only silu is accepted here.",
    ),
    "block_size": (
        "Drafted tokens in one block, 7 when absent: the anchor and 6 masks go in, 7 proposals come out.",
        "The target verifies block_size + 1 rows each round (one more for the bonus token). TokenSpeed's width is 8.",
        "Beyond the trained size the later slots were never trained.",
    ),
    "block_causal": (
        "Mask inside the block: false is bidirectional, every slot sees every slot of its block; true is causal. "
        "dflash_config.causal and full_attention_causal are read, too.",
        "The mask of attention inside the block. Five-layer K3 drafts are bidirectional; the three-layer Block5 and "
        "the K3.1-Pro preview are causal.",
        "The wrong mask runs, and costs about one accepted token each round (measured: 4.6 down to 3.8).",
    ),
    "fc_norm": (
        "Whether each tap goes through an RMSNorm of its own before concatenation (lightseekorg's draft).",
        "Whether the file has fc_norm.0 … fc_norm.4.",
        "Ignored or invented it costs most of the acceptance; strict loading names the tensors.",
    ),
    "aux_hidden_stream": (
        "Which stream the taps read: prefix is AttnRes' raw prefix sum (Inferact's lineage), attn_res the mixture "
        "(lightseekorg, RadixArk).",
        "Where in the target hidden states are taken.",
        "The wrong stream costs 1–5 points of acceptance; without the MLP's term nearly everything.",
    ),
    "sample_from_anchor": (
        "Whether the first slot (the anchor) proposes a token as well; true in DSpark, false in the original DFlash.",
        "Whether γ inputs give γ proposals, or γ + 1 inputs do.",
        "Read DFlash's way, the first token is lost and all others are shifted by one.",
    ),
    "share_target_embeddings": (
        "The draft stores neither embedding nor lm_head and takes the target's. Drafts trained by this project use it; "
        "the published file does not.",
        "Whether the file has embed_tokens.",
        "Impossible where widths differ; with a rotated target (QuaRot) sharing means something else.",
    ),
}
