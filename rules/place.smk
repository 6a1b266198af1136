rule place:
    input:
        model=SOURCE,
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/place.json",
    log:
        f"{DEVICE}/logs/place.log",
    benchmark:
        f"{DEVICE}/benchmarks/place.tsv"
    threads: 1
    params:
        code=code("place"),
        settings=flags("place"),
    shell:
        job("place") + " --model {input.model:q} --activations {input.activations:q} --sparsity {input.sparsity:q}"
        " --device {input.device:q} 2> {log:q}"
