rule device:
    input:
        inputs.declared([CONFIG.near(CONFIG.device_file)]),
    output:
        f"{DEVICE}/device.json",
    log:
        f"{DEVICE}/logs/device.log",
    benchmark:
        f"{DEVICE}/benchmarks/device.tsv"
    localrule: True
    params:
        code=code("device.__main__"),
        files=stamps(CONFIG.near(CONFIG.device_file)),
    shell:
        "{sys.executable:q} -m coldpress.compiler.device resolve {CONFIG.device_file:q} --output {output:q} 2> {log:q}"
