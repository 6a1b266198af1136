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
    params:
        code=code("distill"),
        settings=flags("distill"),
    shell:
        job("distill") + " --model {input.model:q} --corpus {input.corpus:q} --sparsity {input.sparsity:q}"
        " --threads {threads} 2> {log:q}"
