rule allocate:
    input:
        model="ingest.json",
        activations="calibrate.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/allocate.json",
    log:
        f"{DEVICE}/logs/allocate.log",
    benchmark:
        f"{DEVICE}/benchmarks/allocate.tsv"
    threads: 1
    params:
        code=code("allocate"),
        settings=flags("allocate"),
    shell:
        job("allocate") + " --model {input.model:q} --activations {input.activations:q} --device {input.device:q}"
        " 2> {log:q}"
