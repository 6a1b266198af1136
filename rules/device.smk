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
        code=code("device.__main__"),
    shell:
        "{sys.executable} -m compiler.device resolve {input:q} --output {output:q} 2> {log:q}"
