rule device:
    input:
        CONFIG.device_file,
    output:
        f"{DEVICE}/device.json",
    log:
        f"{DEVICE}/logs/device.log",
    benchmark:
        f"{DEVICE}/benchmarks/device.tsv"
    localrule: True
    params:
        code=stage_digest("device"),
    shell:
        RUN + ".device resolve {input:q} --output {output:q} 2> {log:q}"
