rule gram:
    input:
        model=SOURCE,
        corpus=f"{MODEL}/tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        arrays=arrays(SOURCE, f"{MODEL}/tokenize.json", f"{DEVICE}/allocate.json"),
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
