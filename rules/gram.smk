rule gram:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
    output:
        f"{DEVICE}/gram.json",
    log:
        f"{DEVICE}/logs/gram.log",
    benchmark:
        f"{DEVICE}/benchmarks/gram.tsv"
    threads: 8
    params:
        code=code("gram"),
        settings=flags("gram"),
    shell:
        job("gram") + " --model {input.model:q} --corpus {input.corpus:q} --sparsity {input.sparsity:q}"
        " --threads {threads} 2> {log:q}"
