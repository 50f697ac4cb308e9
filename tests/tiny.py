"""A model of 50 thousand random weights with a byte-level tokenizer, made in a moment, for tests."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["guess"]  # one token each, which the bytes can spell too
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    vocab = {piece: n for n, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocab[word[:end]] = len(vocab)
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(folder, *, tied=True, seed=0):
    """Save model and tokenizer in the folder -> the model. Two of its settings would spoil neutral sampling if they acted."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=tied, eos_token_id=7, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spoilers = {"do_sample": True, "temperature": 0.05, "top_k": 1, "repetition_penalty": 2.0, "eos_token_id": [7, 8]}
    (Path(folder) / "generation_config.json").write_text(json.dumps(spoilers))
    return model
