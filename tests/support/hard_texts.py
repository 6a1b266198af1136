"""Texts on which tokenizers differ: scripts, spaces, digits, control characters, marks, long runs, special tokens."""

SPACES = ("", " ", "  ", "a", " a", "  a", "a ", "a  ", "\n", "\n\n", "\n \n", " \n", "\t", "\t\t a", "a\tb", "\r\n")
LINES = ("a\r\nb\r\n\r\nc", "x\n  y\n    z", "  \n  \n", " \t \n \t a", "a   b    c     d", "\r", "a\rb\n\r c", "\n's")
QUOTES = ("Hello, world! It's the model's don't we'll I'VE HE'S you'Re 'S 'll''d", "'s's's 'T 'RE ’s", " 's", "x 's")
DIGITS = ("1234567890 12 345 6789 ١٢٣ ²³ ½ 1,000.50", "1st 2nd x1y2z3", "٠١٢٣٤٥٦٧٨٩ 一二三", "𝟙𝟚𝟛 Ⅷ ⅷ ㎏", "0" * 200)
EMOJI = ("🙂🙂 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪", "👍🏽👍🏿", "\U0001faf8")
SCRIPTS = (
    *("日本語のテキスト、中文字符。한국어 텍스트", "Привет МИР Ελληνικά ΣΊΣΥΦΟΣ ß ẞ İi", "mixed日本and英語words1and2"),
    *(
        "à la carte naïve façade",
        "é ü ñ Å Å ﬁ",
        "İstanbul ǅ ǆ",
        "𝒜𝓁𝓅𝒽𝒶",
        "CamelCaseWord snake_case kebab-case SCREAMING",
    ),
)
MARKS = (
    *("e\u0301 a\u0308o\u0302 n\u0303 \u0301\u0301", "नमस्ते दुनिया ก็ไม่ العربية עִבְרִית", "\u0915\u093c\u094d\u0930"),
    "\u2603\ufe0f\u2603",
)
"""Marks of letters: some splits that llama.cpp has for newer models separate them, against the models' own."""
CODE = (
    *("def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\n", "for(int i=0;i<10;++i){a[i]=b->c&&!d;}"),
    *("https://ex.am/ple?q=1&r=%20#x", "$100 €5 £3 100% #tag @user ~~ ^^ `` || \\\\ ++ == <=>", "...!!!???---___***"),
)
RUNS = ("a" * 300, " " * 300, "\n" * 100, "ab " * 200, "!" * 200, "日" * 120, "\t" * 50 + "x", "▁" * 50)
CONTROLS = (
    *("a\u0000b", "\x01\x02\x1f\x7f", "\u200b\u200c\u200d\ufeff", "\u202eabc\u202c"),
    *("\ufffd\ufffe\uffff", "\U0010ffff \ue000"),
)
RARE_SPACES = ("\u00a0a\u00a0\u2003b\u3000c", "\u0085\u2028\u2029x", "\u1680a \u180e b \u2000c")
PIECES = ("▁a ▁▁b Ġa Ċ", "[PAD151935] [PAD1] <0x0A> <0xE2>", "<|", "|>", "<|im_start", "< |im_start|>", "[UNK]<mask>")
"""Parts of tokens' own texts, and what only looks like a special token."""
HARD_TEXTS = (
    *(*SPACES, *LINES, *QUOTES, *DIGITS, *EMOJI, *SCRIPTS, *MARKS, *CODE, *RUNS, *CONTROLS, *RARE_SPACES, *PIECES),
)


def around(token: str) -> tuple[str, ...]:
    """Returns texts with a special token: alone, in a word, twice, and beside spaces and line breaks."""
    return token, f"a{token}b", token * 2, f" {token} {token}\n", f"x \n{token}\t"
