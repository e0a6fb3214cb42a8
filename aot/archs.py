"""The archs that kernels are built for, one record each. Standard library only.

Add one here, to `cula_arch` in cula.h, and to the axes of each matrix that has kernels for it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    name: str  # as in kernel ids, file names and ARCH=
    number: int  # cula_arch of cula.h
    target: str = ""  # compiler target; "" for the CPU
    cc: tuple[int, int] = (0, 0)  # compute capability of the devices that run it
    smem_limit: int = 0  # bytes of shared memory that a block may opt into
    default_sm_count: int = 0  # of the usual part; plans use it when no device is asked

    @property
    def compute(self) -> str:
        """The virtual target that `target` is generated from: sm_90a -> compute_90a."""
        return self.target.replace("sm_", "compute_")


# The "a" targets: wgmma, tcgen05 and setmaxnreg exist only there, and a cubin runs on its own compute capability in any case.
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("cpu", 1),
        Arch("sm90", 90, "sm_90a", (9, 0), 232448, 132),  # H100, H200 SXM
        Arch("sm100", 100, "sm_100a", (10, 0), 232448, 148),  # B200
        Arch("sm103", 103, "sm_103a", (10, 3), 232448, 148),  # B300
        Arch("sm120", 120, "sm_120a", (12, 0), 101376, 188),  # RTX PRO 6000 Blackwell; GeForce RTX 50
    )
}


def parse_archs(text: str) -> tuple[str, ...]:
    """Arch names of a request such as "sm90", "sm90,sm120" or "all", in the order of ARCHS; cpu is always among them.

    Raises ValueError for an unknown name."""
    names = [name.strip().lower() for name in text.replace(" ", ",").split(",") if name.strip()]
    unknown = [name for name in names if name not in ARCHS and name != "all"]
    if unknown or not names:
        given = f"unknown arch {', '.join(map(repr, unknown))}" if unknown else f"no arch in {text!r}"
        raise ValueError(f"{given}; allowed: {', '.join(ARCHS)}, all, or a comma-separated list of them")
    return tuple(name for name in ARCHS if name in names or name == "cpu" or "all" in names)
