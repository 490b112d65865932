"""vLLM on a kvslot pool, through vLLM's own connector interface and without a change to vLLM.

    LLM(..., kv_transfer_config={
        "kv_connector": "KvslotConnector",
        "kv_connector_module_path": "kvslot.engines.vllm.connector",
        "kv_role": "kv_both",
    })

    connector    what vLLM calls; the only module that imports vLLM
    planner      scheduler's side: which blocks to load and store, when to commit and free
    link         ... and its connection to the daemon, which may come and go
    worker       worker's side: the mapping, and the copies
    blocks       one copy for many blocks of many layers
    region       the second form: vLLM's own memory is what others read, and the pool a directory of it
    keys         what decides whether two engines may read each other's blocks

`python -m kvslot.engines.vllm --model DIR` prints the daemon's configuration for a model.
"""
