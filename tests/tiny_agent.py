"""A tiny Qwen2 agent for `example_env:GuessNumber`, made in a second with no training and no download.

It plays by bigrams: one-hot embeddings and a head that names the next token of `<think></think><action>guess 3</action>`,
so its replies have the right form about nine times in ten and its guesses are random. All other weights are small and
random, so every weight gets a gradient and reinforcement learning has something to find.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ["<think>", "</think>", "<action>", "</action>", *(f"guess {n}" for n in range(1, 13))]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(*, template=True):
    """Bytes, a few whole words, and the control tokens of the Qwen family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(CONTROL, special_tokens=True)
    tokenizer.add_tokens(WORDS)
    tokenizer.chat_template = TEMPLATE if template else None
    return tokenizer


def tiny_agent(folder, *, template=True, tied=False, context=1024, dtype=torch.float32, seed=0):
    """Write model and tokenizer to `folder` -> its path as a string."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer(template=template)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    follows = {"\n": ["<think>"], "<think>": ["</think>"], "</think>": ["<action>"], "<action>": WORDS[4:], "</action>": ["<|im_end|>"]}
    follows |= {word: ["</action>"] for word in WORDS[4:]}

    def number(word):
        return tokenizer(word, add_special_tokens=False).input_ids[0]

    if not tied:
        with torch.no_grad():
            for dim, (word, after) in enumerate(follows.items()):
                model.model.embed_tokens.weight[number(word), dim] = 1.0
                for next_word in after:
                    model.lm_head.weight[number(next_word), dim] = 10 / 64**0.5  # the final norm makes the embedding 64**0.5 long
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
