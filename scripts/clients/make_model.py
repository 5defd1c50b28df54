"""Writes a model that llama.cpp serves for real: a Llama of two small layers with random weights, 0.4 MB.

    python make_model.py MODEL.gguf

What it says means nothing, but is the same each time, and at temperature 0 it is letters, digits and marks only: no other
token is ever the likeliest, so that no answer ends early or in the midst of a character.
"""

import sys

import gguf
import numpy as np

LAYERS = 2
WIDTH = 64
HEADS = 4
KV_HEADS = 2
CONTEXT = 16384

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters():
    """The letter that stands for each byte in byte-level BPE: itself where it is visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def vocabulary():
    """Every byte, some pairs of them, and the tokens that texts cannot name; with the merges that make the pairs."""
    letters = byte_letters()
    space = letters[ord(" ")]
    pairs = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), (space, "a"), (space, "t"), (space + "t", "h")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = letters + [left + right for left, right in pairs] + special
    kinds = [gguf.TokenType.NORMAL] * (256 + len(pairs)) + [gguf.TokenType.CONTROL] * len(special)
    return tokens, kinds, [f"{left} {right}" for left, right in pairs]


def main(path):
    tokens, kinds, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("kvlb-tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    chance = np.random.default_rng(1)

    def weights(*shape, scale=0.3):
        return (chance.standard_normal(shape) * scale).astype(np.float32)

    # A row of zeros makes a token as likely as the average; of a hundred others one always is likelier.
    out = weights(len(tokens), WIDTH, scale=0.2)
    for number, token in enumerate(tokens):
        if not (len(token) == 1 and token.isascii()):
            out[number] = 0
    writer.add_tensor("token_embd.weight", weights(len(tokens), WIDTH, scale=1.0))
    writer.add_tensor("output.weight", out)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    kv_width = KV_HEADS * WIDTH // HEADS
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        writer.add_tensor(name + "attn_norm.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(name + "ffn_norm.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(name + "attn_q.weight", weights(WIDTH, WIDTH))
        writer.add_tensor(name + "attn_k.weight", weights(kv_width, WIDTH))
        writer.add_tensor(name + "attn_v.weight", weights(kv_width, WIDTH))
        writer.add_tensor(name + "attn_output.weight", weights(WIDTH, WIDTH))
        writer.add_tensor(name + "ffn_gate.weight", weights(2 * WIDTH, WIDTH))
        writer.add_tensor(name + "ffn_up.weight", weights(2 * WIDTH, WIDTH))
        writer.add_tensor(name + "ffn_down.weight", weights(WIDTH, 2 * WIDTH))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(sys.argv[1])
