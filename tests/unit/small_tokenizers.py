"""Small real tokenizers of the kinds that models have: no files, no network."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from warmroot.router.byte_alphabet import BYTE_TO_CHAR
from warmroot.router.tokenizer import Tokenizer
from warmroot.router.tokenizer_parts import TokenizerParts

WORDS = ("hello", "world", "stop", "the", "end")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(chat_template: str | None = CHATML) -> Tokenizer:
    """Ids 0..255 are the bytes, then words with and without a space before them, then three special tokens."""
    vocab = {BYTE_TO_CHAR[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for text in (word, BYTE_TO_CHAR[32] + word):
            for end in range(2, len(text) + 1):
                if text[:end] not in vocab:
                    merges.append((text[: end - 1], text[end - 1]))
                    vocab[text[:end]] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    backend.add_special_tokens(["<|endoftext|>", *special.values()])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(TokenizerParts(backend, special, chat_template))


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """Ids 0..2 are special, 3..258 the bytes, then letters and words; a text begins with a space that is stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for text in ["\u2581", *"abcdefghijklmnopqrstuvwxyz.!é", *(f"\u2581{word}" for word in WORDS)]:
        for end in range(1, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
                if end > 1:
                    merges.append((text[: end - 1], text[end - 1]))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(TokenizerParts(backend, special, None))


def word_level() -> Tokenizer:
    """Words joined by spaces: a decoder that is not a concatenation of bytes."""
    vocab = {word: index for index, word in enumerate(("<unk>", *WORDS, "##ing", "##s"))}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(TokenizerParts(backend, {}, None))
