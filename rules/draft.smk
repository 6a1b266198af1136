# It reads the draft model's artifact, which never leaves this machine.
rule draft:
    input:
        DRAFT_MANIFEST,
        model=DENSE,
        corpus=CORPUS,
        draft_corpus=DRAFT_CORPUS,
        draft_package=DRAFT_PACKAGE,
        arrays=arrays(DENSE, CORPUS),
    output:
        record=f"{DEVICE}/draft.json",
        arrays=directory(f"{DEVICE}/draft"),
    log:
        f"{DEVICE}/logs/draft.log",
    benchmark:
        f"{DEVICE}/benchmarks/draft.tsv"
    localrule: STORED
    threads: 8
    resources:
        **needs("draft"),
    params:
        **commands.params(CONFIG, "draft"),
    shell:
        commands.job("draft")
