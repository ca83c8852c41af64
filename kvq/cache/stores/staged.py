"""One layer under a staged recipe: the youngest tokens and the first ones plain, the others in sealed blocks.

Blocks are sealed by the step that makes them old enough, before it attends. Which form of a token a query
sees depends on their positions alone, so how tokens came in, in which chunks, from a prefix, after a swap or
twice, changes nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.kernels import AttentionOptions, Device, KernelSpec, StagedBatch, StagedKV, select
from kvq.kernels.attend.options import parts_of

Seal = Callable[[StagedKV, StagedBatch], None]


class StagedLayer:
    """The kernels of a staged layer: seals blocks, and attends from all forms of its tokens."""

    def __init__(
        self,
        spec: KernelSpec,
        plain: KernelSpec,
        device: Device,
        backend: str,
        *,
        sees_old: bool = True,
        is_latent: bool = False,
    ) -> None:
        """`spec`: of sealed blocks; `plain`: of the staging area's. `sees_old`: False for layers whose window
        ends within the recent tokens: blocks leave it before they are old enough, so none may be sealed.

        Raises:
            UnsupportedKernel: no backend can run them.
        """
        self.sees_old = sees_old
        sealing = select("seal", spec, device, backend)
        self.seal: Seal = sealing.run
        self.seal_backend = sealing.backend
        attend = "attend_latent" if is_latent else "attend"
        self._attend_sealed = select(attend, spec, device, backend)
        self._attend_plain = select(attend, plain, device, backend)
        self._merge = select("merge_partials", plain, device)

    def attend(
        self, q: Tensor, kv: StagedKV, batch: StagedBatch, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Seal what the step's tokens make old enough, then attend over all tokens, as `KVCache.attend`."""
        if not self.sees_old:
            found: tuple[Tensor, Tensor] = self._attend_plain.run(q, kv.recent, batch.recent, options)
            return found
        self.seal(kv, batch)
        return self.attend_sealed(q, kv, batch, options)

    def attend_sealed(
        self, q: Tensor, kv: StagedKV, batch: StagedBatch, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend likewise, where blocks that are old enough were sealed before."""
        own = options.without_sinks()
        sealed, recent, sinks = (own.of_part(part) for part in parts_of(kv.exact, kv.sealed.block_size))
        query = q.float() if q.device.type == "cpu" else q  # parts stay fp32 there until they are merged
        parts = [
            self._attend_sealed.run(query, kv.sealed, batch.sealed, sealed),
            self._attend_plain.run(query, kv.recent, batch.recent, recent),
        ]
        if kv.sinks is not None:
            parts.append(self._attend_plain.run(query, kv.sinks, batch.sinks, sinks))
        outs, lses = (torch.stack(all_of) for all_of in zip(*parts, strict=True))
        out, lse = self._merge.run(outs, lses, options.sinks)
        return out.to(q.dtype), lse
