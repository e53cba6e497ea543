# SPDX-License-Identifier: Apache-2.0
"""The operators of a decode step on an accelerator: torch tensors in, torch tensors out, nothing read by the host.

Everything here runs on tensors of any device, so that the code that serves an NPU is tested on the CPU; only what
calls CANN (``aclnn``), torch_npu (``alias``, ``stream``) or a side stream differs. Needs torch, and is therefore not
imported by ``tidal_connector.ops``: import the modules by name.

``state``      what the slots hold, and the fixed buffers of a step
``staging``    a step's batch from the host into these buffers
``resolve``    selected positions -> slots, and the rows to fetch; exact LRU, as ``ops.resolve`` defines it
``library``    ``torch.ops.tidal.*``: the two AscendC operators for torch, with CPU and fake implementations
``miss_rows``  the definition of one of them (the other's is ``ops.gather_selection_kv_cache``)
``arguments``  what the operators' tensors are called
``calls``      torch tensors -> calls of CANN; ``aclnn`` makes these through ctypes, without torch
``rows``       new rows into a paged pool, for a host that does not write them itself (vllm-ascend does)
``alias``      a tensor over the device's alias of host memory
``stream``     the side stream and its events
"""
