# It reads the draft model's artifact, which never leaves this machine.
rule draft:
    input:
        DRAFT_MANIFEST,
        model=DENSE,
        corpus=f"{MODEL}/tokenize.json",
        draft_corpus=DRAFT_CORPUS,
        draft_package=DRAFT_PACKAGE,
        arrays=arrays(DENSE, f"{MODEL}/tokenize.json"),
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
        mem_mb=mem_mb("draft"),
        runtime=runtime("draft"),
    params:
        code=commands.code(CONFIG, "draft"),
        settings=commands.settings(CONFIG, "draft"),
        records=commands.records,
    shell:
        commands.job("draft")
