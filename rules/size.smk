rule size:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        ladders=per_chunk("predict"),
    output:
        f"{DEVICE}/size.json",
    log:
        f"{DEVICE}/logs/size.log",
    benchmark:
        f"{DEVICE}/benchmarks/size.tsv"
    threads: 8
    params:
        code=code("size"),
        settings=flags("size"),
    shell:
        job("size") + " --model {input.model:q} --corpus {input.corpus:q} --sparsity {input.sparsity:q}"
        " --ladders {input.ladders:q} --threads {threads} 2> {log:q}"
