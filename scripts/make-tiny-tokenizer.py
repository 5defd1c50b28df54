#!/usr/bin/env python3
"""Writes tests/golden/tiny-tokenizer/: a small byte-level BPE tokenizer with a chat template, so that tests need no network.

Needs `pip install tokenizers==0.23.3`. The text it is trained on is in this file; the result is the same in every run.
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TARGET = pathlib.Path(__file__).parent.parent / "tests/golden/tiny-tokenizer"

# Where text is cut before tokens are looked for: words with the space before them, single digits, runs of marks and of spaces.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' + call.function.name + ' ' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TEXT = """\
You are a helpful assistant who answers in short and plain sentences. The user asks a question and the system gives the rules.
A load balancer sends each request to the engine that already holds most of its prompt. The engine keeps the keys and values of a
block of tokens in memory, and a block has a name that is made from its tokens and from the name of the block before it. When two
prompts begin with the same words, they share their first blocks, and whoever computed them once need not compute them again.
Please summarise the following document. What is the capital of France? How many people live in the city, and since when? Write a
function that returns the sum of two numbers, then explain how it works. Translate this text into German, French and Spanish.
The weather in Paris is mild today; tomorrow it will rain. She opened the door, looked at the garden and said nothing for a while.
If the answer is not in the document, say that you do not know. Here is an example of a question with its answer. Think step by step.
Der Lastverteiler schickt jede Anfrage an die Maschine, die den Anfang des Textes schon kennt. Wie spät ist es? Über den Wolken.
Le serveur garde en mémoire le début du texte. Où est la gare ? C'est déjà très bien. ¿Dónde está la estación? Mañana será otro día.
def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, 1))\n\nif __name__ == "__main__":\n    main()\n
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "c"}, "type": "function", "required": ["city"], "description": null}
0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 3.14 2026-11-30 12:34:56 192.0.2.1 http://example.com/path?query=1&more=2#part
今天天气很好。日本語のテキストです。한국어 문장입니다. Привет, мир. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم 😀👍
"""


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    TARGET.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(TARGET / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "chat_template": TEMPLATE,
    }
    (TARGET / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(tokenizer.get_vocab_size(), "tokens,", (TARGET / "tokenizer.json").stat().st_size, "bytes")


main()
