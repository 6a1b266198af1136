rule gram:
    input:
        model=SOURCE,
        corpus=CORPUS,
        sparsity=SPARSITY,
        arrays=arrays(SOURCE, CORPUS, SPARSITY),
    output:
        record=f"{DEVICE}/gram.json",
        arrays=directory(f"{DEVICE}/gram"),
    log:
        f"{DEVICE}/logs/gram.log",
    benchmark:
        f"{DEVICE}/benchmarks/gram.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("gram"),
    params:
        **commands.params(CONFIG, "gram"),
    shell:
        commands.job("gram")
