DEVICE_FILES = [CONFIG.near(CONFIG.device_file)]


# Runs first and alone, by priority and cores: preflight reads the record, and a long stage must not begin before it.
rule device:
    input:
        local(inputs.declared(DEVICE_FILES)),
    output:
        record=f"{DEVICE}/device.json",
    log:
        f"{DEVICE}/logs/device.log",
    benchmark:
        f"{DEVICE}/benchmarks/device.tsv"
    priority: 1
    localrule: True
    threads: workflow.cores
    resources:
        mem_mb=200,
        runtime=10,
    params:
        code=commands.code(CONFIG, "device.command"),
        files=inputs.stamps(CONFIG, DEVICE_FILES),
    shell:
        "{sys.executable:q} -m coldpress device resolve {CONFIG.device_file:q} --output {output:q} 2> {log:q}"
