rule distill:
    input:
        model=DENSE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
    output:
        f"{DEVICE}/distill.json",
    log:
        f"{DEVICE}/logs/distill.log",
    benchmark:
        f"{DEVICE}/benchmarks/distill.tsv"
    threads: 8
    resources:
        mem_mb=mem_mb("distill"),
        runtime=runtime("distill"),
    params:
        code=commands.code(CONFIG, "distill"),
        settings=commands.settings(CONFIG, "distill"),
        records=commands.records,
    shell:
        commands.job("distill")
