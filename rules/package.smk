rule package:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        device=f"{DEVICE}/device.json",
        layout=f"{DEVICE}/layout.json",
        order=per_chunk("order"),
        placement=f"{DEVICE}/place.json",
        quantized=per_chunk("quantize"),
        predictors=PREDICTORS,
    output:
        record=f"{DEVICE}/package.json",
        due=[touch(path) for path in PACKAGE_DUE],
    log:
        f"{DEVICE}/logs/package.log",
    benchmark:
        f"{DEVICE}/benchmarks/package.tsv"
    localrule: True
    threads: 1
    params:
        code=code("package"),
        settings=flags("package"),
    shell:
        job("package") + " --artifact {UNPUBLISHED:q} --model {input.model:q} --corpus {input.corpus:q}"
        " --sparsity {input.sparsity:q} --device {input.device:q} --layout {input.layout:q} --order {input.order:q}"
        " --placement {input.placement:q} --quantized {input.quantized:q}" + PREDICTORS_FLAG + " 2> {log:q}"
