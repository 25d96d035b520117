#include "launcher/app.h"

#include <torch/version.h>

#include <sstream>

namespace birkhoff {

std::string version_text() {
  std::ostringstream text;
  text << "birkhoff " << BIRKHOFF_VERSION << '\n'
       << "compiler " << BIRKHOFF_COMPILER << '\n'
       << "LibTorch " << TORCH_VERSION << '\n'
       << "CUDA " << BIRKHOFF_CUDA_VERSIONS << '\n'
       << "MPI " << BIRKHOFF_MPI << '\n'
       << "HDF5 " << BIRKHOFF_HDF5 << '\n'
       << "Protobuf " << BIRKHOFF_PROTOBUF << '\n'
       << "SentencePiece " << BIRKHOFF_SENTENCEPIECE << '\n'
       << "fmt " << BIRKHOFF_FMT << ", CLI11 " << BIRKHOFF_CLI11 << ", nlohmann-json "
       << BIRKHOFF_JSON << '\n';
  return text.str();
}

}  // namespace birkhoff
