rule quantize:
    input:
        model=SOURCE,
        sparsity=f"{DEVICE}/allocate.json",
        gram=GRAM,
        importance=IMPORTANCE,
    output:
        f"{DEVICE}/quantize/{{chunk}}.json",
    log:
        f"{DEVICE}/logs/quantize/{{chunk}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/quantize/{{chunk}}.tsv"
    threads: 1
    params:
        code=code("quantize"),
        settings=flags("quantize"),
        layers=layers,
    shell:
        job("quantize")
        + " --model {input.model:q} --sparsity {input.sparsity:q}"
        + GRAM_FLAG
        + IMPORTANCE_FLAG
        + " --layers {params.layers} 2> {log:q}"
