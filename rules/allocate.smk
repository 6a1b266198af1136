rule allocate:
    input:
        model=DENSE,
        corpus="tokenize.json",
        activations="calibrate.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/allocate.json",
    log:
        f"{DEVICE}/logs/allocate.log",
    benchmark:
        f"{DEVICE}/benchmarks/allocate.tsv"
    threads: 8
    params:
        code=code("allocate"),
        settings=flags("allocate"),
    shell:
        job("allocate") + " --model {input.model:q} --corpus {input.corpus:q} --activations {input.activations:q}"
        " --device {input.device:q} --threads {threads} 2> {log:q}"
