# Untried: Python compiles it, but no Spack has built it.
#   spack repo add cmake/site/spack
# spack dev-build birkhoff@main torch=/path/to/libtorch        in a checkout; the folder with
# include/ and lib/
from spack.package import *


class Birkhoff(CMakePackage):
    """Trains Transformers with sparse and doubly stochastic attention on Slurm clusters."""

    version("main")

    variant("cuda", default=False, description="Kernels for GPUs, and NCCL between them")
    # LibTorch is pinned to one version, which py-torch may not have; PyPI's wheel is a LibTorch.
    variant("torch",
            default="none",
            values=lambda value: True,
            description="Folder of a LibTorch 2.11, with include/ and lib/")

    depends_on("cmake@3.25:", type="build")
    depends_on("ninja", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("mpi@3:")
    depends_on("hdf5@1.10:~mpi")
    depends_on("protobuf@3.21")
    depends_on("sentencepiece")
    depends_on("fmt@9:")
    depends_on("cli11@2:")
    depends_on("nlohmann-json@3.11:")
    depends_on("xxhash@0.8:")
    depends_on("zlib-api")
    depends_on("libpng")
    depends_on("jpeg")
    depends_on("minizip")
    depends_on("zstd")
    depends_on("cuda@13", when="+cuda")
    depends_on("nccl", when="+cuda")

    conflicts("%gcc@:11", msg="C++20 needs GCC 12")

    def cmake_args(self):
        torch = self.spec.variants["torch"].value
        if torch == "none":
            raise InstallError("name a LibTorch 2.11: torch=/path/to/libtorch (docs/install.md)")
        return [
            self.define("BIRKHOFF_TORCH", torch),
            self.define("BIRKHOFF_BUILD_TESTS", False),
            self.define_from_variant("BIRKHOFF_CUDA", "cuda"),
        ]
