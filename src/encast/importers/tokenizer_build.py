"""Building tokenizers from vocabulary files, one function a family.

What transformers 5 builds for the same files is the reference, quirks included
(``tests/reference/test_tokenizers.py`` compares token by token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from encast.errors import CheckpointError, UnsupportedModelError, translated
from encast.importers.files import Folder, parse_json, quote
from encast.importers.sentencepiece_model import (
    CONTROL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    parse_sentencepiece,
)
from encast.importers.tokenizer_added import add_special
from encast.importers.tokenizer_fields import (
    Fields,
    albert_fields,
    bert_fields,
    deberta_fields,
    piece_fields,
    roberta_fields,
)
from encast.importers.tokenizer_settings import TokenizerSettings

__all__ = [
    "FAMILIES",
    "SENTENCEPIECE_FILES",
    "VOCAB_LIMIT",
    "Family",
    "build_tokenizer",
    "class_of",
    "family_of",
    "guarded",
    "trim_line",
]

VOCAB_LIMIT = 256 << 20
SENTENCEPIECE_FILES = (
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.model",
    "spm.model",
)

# What Rust's `str::trim_end` removes (Unicode White_Space); Python's `rstrip` also takes U+001C to U+001F.
_RUST_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"

_BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_ROBERTA = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "sep": "</s>",
    "pad": "<pad>",
    "cls": "<s>",
    "mask": "<mask>",
}


def trim_line(line: str) -> str:
    """A line of ``vocab.txt`` as the tokenizers library takes it."""
    return line.rstrip(_RUST_SPACE)


@dataclass(frozen=True)
class Family:
    """Tokenizers that are built alike.

    ``classes``: names of transformers' tokenizer classes; ``model_types``: config.json's, for checkpoints
    that name no class; ``defaults``: role → special token; ``optional``: roles that may be without one;
    ``fields``: what tokenizer_config.json changes in a tokenizer.json; ``greedy_mask``: a mask given as a
    bare string takes the space before it.
    """

    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    defaults: Mapping[str, str]
    optional: tuple[str, ...]
    build: Callable[[Folder, TokenizerSettings, Mapping[str, AddedToken]], Tokenizer]
    fields: Fields
    greedy_mask: bool = False

    def special(self, settings: TokenizerSettings) -> dict[str, AddedToken]:
        """Role or custom name → token: those that the settings name, and the class's own for other roles."""
        special = {role: AddedToken(token, special=True) for role, token in self.defaults.items()}
        special.update(settings.special)
        if self.greedy_mask and ("mask" in settings.plain or "mask" not in settings.special):
            special["mask"] = AddedToken(special["mask"].content, lstrip=True, special=True)
        return {role: token for role, token in special.items() if role not in settings.absent}


def guarded(where: str) -> AbstractContextManager[None]:
    """Turns what the tokenizers library raises, Rust panics included, into a ``CheckpointError``."""
    return translated(
        lambda reason: CheckpointError(
            f"{where}: not a tokenizer that the tokenizers library accepts ({reason}); it is damaged or needs a newer "
            "version of that library"
        )
    )


def class_of(settings: TokenizerSettings, config: Mapping[str, Any]) -> str | None:
    """The class of transformers that the checkpoint names for its tokenizer."""
    names = (settings.tokenizer_class, config.get("tokenizer_class"))
    return next((name for name in names if isinstance(name, str)), None)


def family_of(settings: TokenizerSettings, config: Mapping[str, Any]) -> Family | None:
    """By the tokenizer's class, else by the model's type; None when neither is known."""
    names = [settings.tokenizer_class, config.get("tokenizer_class")]
    for name in names:
        if isinstance(name, str):
            for family in FAMILIES:
                if name.removesuffix("Fast") in family.classes:
                    return family
            if name.removesuffix("Fast") not in ("PreTrainedTokenizer", "TokenizersBackend"):
                return None
    return next((family for family in FAMILIES if config.get("model_type") in family.model_types), None)


def build_tokenizer(folder: Folder, settings: TokenizerSettings, family: Family | None) -> Tokenizer:
    """Raises ``CheckpointError`` when files are missing or damaged, ``UnsupportedModelError`` on unknown kinds."""
    if family is None:
        raise UnsupportedModelError(
            f"{folder.root}: there is no tokenizer.json, and the tokenizer class "
            f"{quote(settings.tokenizer_class or '')} cannot be built from vocabulary files; known are "
            f"{', '.join(name for each in FAMILIES for name in each.classes)}. Save a tokenizer.json with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    for role in settings.absent & set(family.defaults):
        if role not in family.optional:
            raise CheckpointError(f"{settings.where}: {role}_token is null, but a {family.classes[0]} needs one")
    with guarded(str(folder.root)):
        return family.build(folder, settings, family.special(settings))


def _missing(folder: Folder, accepted: str) -> CheckpointError:
    return CheckpointError(f"{folder.root}: no tokenizer; accepted are tokenizer.json or, for this model, {accepted}")


def _processor_token(tokenizer: Tokenizer, token: AddedToken) -> tuple[str, int]:
    index = tokenizer.token_to_id(token.content)
    assert index is not None, "special tokens are added before the post-processor is made"
    return token.content, index


# WordPiece: BERT, DistilBERT, ELECTRA, MPNet


def _word_piece(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    if not folder.has("vocab.txt"):
        raise _missing(folder, "vocab.txt")
    where = str(folder.path("vocab.txt"))
    try:
        text = folder.read("vocab.txt", VOCAB_LIMIT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}; the file is damaged") from None
    vocab = {trim_line(line): index for index, line in enumerate(text.removesuffix("\n").split("\n"))}
    unk = special["unk"].content
    if unk not in vocab:
        raise CheckpointError(f"{where}: lacks the unknown token {quote(unk)}; the file is incomplete")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unk))
    lowercase = settings.flag("do_lower_case", True)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.flag("tokenize_chinese_chars", True)),
        strip_accents=settings.flag("strip_accents", None),
        lowercase=bool(lowercase),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _build_bert(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    tokenizer = _word_piece(folder, settings, special)
    add_special(tokenizer, settings, special)
    tokenizer.post_processor = _cls_sep_types(tokenizer, special)
    return tokenizer


def _build_mpnet(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    tokenizer = _word_piece(folder, settings, special)
    add_special(tokenizer, settings, special)
    tokenizer.post_processor = processors.RobertaProcessing(
        _processor_token(tokenizer, special["sep"]),
        _processor_token(tokenizer, special["cls"]),
        trim_offsets=True,
        add_prefix_space=False,
    )
    return tokenizer


# Byte-level BPE: RoBERTa


def _build_roberta(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    if not folder.has("vocab.json") or not folder.has("merges.txt"):
        raise _missing(folder, "vocab.json with merges.txt")
    where = str(folder.path("vocab.json"))
    vocab = parse_json(folder.read("vocab.json", VOCAB_LIMIT), where)
    if not isinstance(vocab, dict) or not all(type(index) is int and 0 <= index < 2**31 for index in vocab.values()):
        raise CheckpointError(f"{where}: must be an object from tokens to ids")
    if len(set(vocab.values())) != len(vocab):
        raise CheckpointError(f"{where}: two tokens share an id")
    where = str(folder.path("merges.txt"))
    try:
        lines = folder.read("merges.txt", VOCAB_LIMIT).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}; the file is damaged") from None
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#version") or (not line and number == len(lines)):
            continue
        parts = line.removesuffix("\r").split(" ")
        if len(parts) != 2:
            raise CheckpointError(f"{where}: line {number} must be two tokens with a space between")
        merges.append((parts[0], parts[1]))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    add_prefix_space = bool(settings.flag("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    add_special(tokenizer, settings, special)
    tokenizer.post_processor = processors.RobertaProcessing(
        _processor_token(tokenizer, special["sep"]),
        _processor_token(tokenizer, special["cls"]),
        trim_offsets=bool(settings.flag("trim_offsets", True)),
        add_prefix_space=add_prefix_space,
    )
    return tokenizer


def _build_gluon_roberta(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    """RoBERTa's, with one separator between the texts of a pair, as GluonNLP's scripts feed its classifier."""
    tokenizer = _build_roberta(folder, settings, special)
    cls, sep = special["cls"].content, special["sep"].content
    template = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B", sep],
        special_tokens=[_processor_token(tokenizer, special[role]) for role in ("cls", "sep")],
    )
    trim = processors.ByteLevel(
        trim_offsets=bool(settings.flag("trim_offsets", True)),
        add_prefix_space=bool(settings.flag("add_prefix_space", False)),
    )
    tokenizer.post_processor = processors.Sequence([trim, template])
    return tokenizer


# Unigram from a sentencepiece model: XLM-RoBERTa, CamemBERT, ALBERT, DeBERTa


def _read_unigram(folder: Folder) -> SentencePieceModel:
    name = folder.pick(SENTENCEPIECE_FILES)
    if name is None:
        raise _missing(folder, f"a sentencepiece model ({', '.join(SENTENCEPIECE_FILES)})")
    model = parse_sentencepiece(folder.read(name, VOCAB_LIMIT), str(folder.path(name)))
    if model.model_type != UNIGRAM:
        raise UnsupportedModelError(
            f"{folder.path(name)}: model_type {model.model_type}; only unigram models ({UNIGRAM}) are supported"
        )
    return model


def _unigram(
    model: SentencePieceModel,
    vocab: list[tuple[str, float]],
    unk_id: int,
    settings: TokenizerSettings,
    before: list[Any] | None = None,
) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=unk_id, byte_fallback=False))
    charsmap = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if before is not None:
        tokenizer.normalizer = normalizers.Sequence([*before, *charsmap])
    elif charsmap:
        tokenizer.normalizer = charsmap[0]
    scheme = "always" if settings.flag("add_prefix_space", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    return tokenizer


def _symbols(model: SentencePieceModel) -> list[AddedToken]:
    """Control and user-defined pieces, which are found in raw text unless the config names extra tokens itself."""
    return [
        AddedToken(piece.text, normalized=False, special=piece.kind == CONTROL)
        for piece in model.pieces
        if piece.kind in (CONTROL, USER_DEFINED)
    ]


def _build_fairseq(
    folder: Folder,
    settings: TokenizerSettings,
    special: Mapping[str, AddedToken],
    head: list[tuple[str, float]],
    skip: int,
) -> Tokenizer:
    """fairseq numbered its special tokens first: the pieces after their own special ones come behind ``head``."""
    model = _read_unigram(folder)
    pieces = [(piece.text, piece.score) for piece in model.pieces[skip:]]
    tokenizer = _unigram(model, [*head, *pieces, (special["mask"].content, 0.0)], 3, settings)
    add_special(tokenizer, settings, special, _symbols(model))
    bos, eos = special["bos"].content, special["eos"].content
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=[_processor_token(tokenizer, special[role]) for role in ("bos", "eos")],
    )
    return tokenizer


def _build_xlm_roberta(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    head = [(special[role].content, 0.0) for role in ("bos", "pad", "eos", "unk")]
    return _build_fairseq(folder, settings, special, head, 3)


def _build_camembert(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    pad, unk = special["pad"].content, special["unk"].content
    head = [("<s>NOTUSED", 0.0), (pad, 0.0), ("</s>NOTUSED", 0.0), (unk, 0.0), ("<unk>NOTUSED", -100.0)]
    return _build_fairseq(folder, settings, special, head, 1)


def _build_albert(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    model = _read_unigram(folder)
    before: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.flag("keep_accents", False):
        before += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.flag("do_lower_case", True):
        before.append(normalizers.Lowercase())
    tokenizer = _unigram(model, [(piece.text, piece.score) for piece in model.pieces], 1, settings, before)
    add_special(tokenizer, settings, special, _symbols(model))
    tokenizer.post_processor = _cls_sep_types(tokenizer, special)
    return tokenizer


def _build_deberta(folder: Folder, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> Tokenizer:
    """Of the model the pieces alone: transformers 5 has rules of its own in place of the model's normalisation."""
    model = _read_unigram(folder)
    vocab = [(piece.text, piece.score) for piece in model.pieces]
    unknown = (special["unk"].content, 0.0)
    # Else the model's own unknown piece, of which there is one.
    own = next((index for index, piece in enumerate(model.pieces) if piece.kind == UNKNOWN), 0)
    unk_id = vocab.index(unknown) if unknown in vocab else own
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=unk_id, byte_fallback=False))
    before: list[Any] = [normalizers.Lowercase()] if settings.flag("do_lower_case", False) else []
    tokenizer.normalizer = normalizers.Sequence(
        [
            *before,
            normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
            normalizers.NFC(),
            normalizers.Strip(left=False, right=True),
        ]
    )
    scheme = "always" if settings.flag("add_prefix_space", True) else "first"
    split = [pre_tokenizers.Punctuation(behavior="isolated")] if settings.flag("split_by_punct", False) else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    add_special(tokenizer, settings, special, _symbols(model))
    tokenizer.post_processor = _cls_sep_types(tokenizer, special)
    return tokenizer


def _cls_sep_types(tokenizer: Tokenizer, special: Mapping[str, AddedToken]) -> Any:
    cls, sep = special["cls"].content, special["sep"].content
    return processors.TemplateProcessing(
        single=[f"{cls}:0", "$A:0", f"{sep}:0"],
        pair=[f"{cls}:0", "$A:0", f"{sep}:0", "$B:1", f"{sep}:1"],
        special_tokens=[_processor_token(tokenizer, special[role]) for role in ("cls", "sep")],
    )


_BOUNDS_AND_MASK = ("bos", "eos", "pad", "mask")

FAMILIES = (
    Family(
        ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
        ("bert", "distilbert", "electra", "nomic_bert"),
        _BERT,
        ("pad", "mask"),
        _build_bert,
        bert_fields,
    ),
    Family(
        ("MPNetTokenizer",), ("mpnet",), {**_ROBERTA, "unk": "[UNK]"}, _BOUNDS_AND_MASK, _build_mpnet, bert_fields, True
    ),
    Family(("RobertaTokenizer",), ("roberta",), _ROBERTA, _BOUNDS_AND_MASK, _build_roberta, roberta_fields),
    Family(("GluonRobertaTokenizer",), (), _ROBERTA, _BOUNDS_AND_MASK, _build_gluon_roberta, roberta_fields),
    Family(("XLMRobertaTokenizer",), ("xlm-roberta",), _ROBERTA, ("cls", "sep"), _build_xlm_roberta, piece_fields),
    Family(("CamembertTokenizer",), ("camembert",), _ROBERTA, ("cls", "sep"), _build_camembert, piece_fields, True),
    Family(
        ("AlbertTokenizer",),
        ("albert",),
        {"bos": "[CLS]", "eos": "[SEP]", **_BERT, "unk": "<unk>", "pad": "<pad>"},
        _BOUNDS_AND_MASK,
        _build_albert,
        albert_fields,
    ),
    Family(
        ("DebertaV2Tokenizer",),
        ("deberta-v2",),
        {"bos": "[CLS]", "eos": "[SEP]", **_BERT},
        _BOUNDS_AND_MASK,
        _build_deberta,
        deberta_fields,
    ),
)
"""Every kind of tokenizer that can be built from vocabulary files."""
