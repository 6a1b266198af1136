rule export:
    input:
        package=f"{DEVICE}/publish.json",
    output:
        record=f"{DEVICE}/export.json",
        exported=f"{DEVICE}/{CONFIG.model.name}-{CONFIG.target}.{CONFIG['export']}",
    log:
        f"{DEVICE}/logs/export.log",
    benchmark:
        f"{DEVICE}/benchmarks/export.tsv"
    threads: 1
    params:
        code=code("export"),
        settings=flags("export"),
    shell:
        job("export") + " --file {output.exported:q} --package {input.package:q} 2> {log:q}"
