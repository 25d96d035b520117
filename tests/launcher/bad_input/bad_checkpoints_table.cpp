// Damaged checkpoints, as verify, inspect, eval and sample see them. accept_file() and
// edit_checkpoint() make the hashes around a damage match, so that only the content can reveal it.
#include <limits>

#include "configs/schema/checkpoint_manifest.pb.h"
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

using configs::CheckpointManifest;

const std::string kFolder = "run/checkpoints/step-00000004";
const std::string kManifest = kFolder + "/manifest.json";

BadInput verify(std::string name, std::vector<std::string> words, std::function<void()> spoil) {
  words.push_back("step-00000004");
  return {.name = "checkpoint " + name,
          .line = "verify " + kFolder,
          .code = ExitCode::kCheckpoint,
          .words = std::move(words),
          .spoil = std::move(spoil)};
}

BadInput seen_by(const std::string& line, BadInput row) {
  row.name += ", seen by " + line.substr(0, line.find(' '));
  row.line = line;
  return row;
}

std::string model() { return checkpoint_file(kFolder, "model-"); }
std::string optimizer() { return checkpoint_file(kFolder, "optimizer-"); }
std::int64_t size_of(const std::string& path) {
  return static_cast<std::int64_t>(read_bytes(path).size());
}

std::vector<BadInput> files() {
  return {
      as_process_too(
          verify("model missing", {"model-", "No such file"}, [] { remove_one(model()); })),
      seen_by("sample " + kFolder + " --prompt a",
              verify("model missing", {"model-", "No such file"}, [] { remove_one(model()); })),
      verify("model empty", {"model-", "0 bytes"}, [] { truncate_to(model(), 0); }),
      verify("model a byte short", {"model-", "the manifest says"},
             [] { truncate_to(model(), size_of(model()) - 1); }),
      verify("model a byte long", {"model-", "the manifest says"},
             [] { append_bytes(model(), "x"); }),
      verify("model's header length flipped", {"model-"}, [] { flip_bit(model(), 7); }),
      verify("model's header flipped", {"model-"}, [] { flip_bit(model(), 20); }),
      as_process_too(verify("model's last byte flipped", {"model-", "damaged", "CRC32C"},
                            [] { flip_bit(model(), -1); })),
      seen_by("eval " + kFolder, verify("model's byte flipped", {"model-", "damaged"},
                                        [] { flip_bit(model(), -2000); })),
      seen_by("inspect " + kFolder, verify("model's byte flipped", {"model-", "damaged"},
                                           [] { flip_bit(model(), -2000); })),
      verify("model of zeros", {"model-"},
             [] {
               write_bytes(model(), std::string(static_cast<std::size_t>(size_of(model())), '\0'));
             }),
      verify("model of the step before", {"model-", "damaged"},
             [] {
               write_bytes(model(),
                           read_bytes(checkpoint_file("run/checkpoints/step-00000002", "model-")));
             }),
      verify("model and optimizer swapped", {"the manifest says"},
             [] { swap_files(model(), optimizer()); }),
      verify("model a folder", {"model-"},
             [] {
               const std::string file = model();
               remove_one(file);
               std::filesystem::create_directory(file);
             }),
      verify("optimizer missing", {"optimizer-", "No such file"}, [] { remove_one(optimizer()); }),
      verify("optimizer truncated", {"optimizer-", "the manifest says"},
             [] { truncate_to(optimizer(), 100); }),
      verify("optimizer flipped", {"optimizer-", "damaged"}, [] { flip_bit(optimizer(), -100); }),
      verify("index missing", {"model.safetensors.index.json", "No such file"},
             [] { remove_one(kFolder + "/model.safetensors.index.json"); }),
      verify("index flipped", {"model.safetensors.index.json", "hash"},
             [] { flip_bit(kFolder + "/model.safetensors.index.json", 10); }),
      verify("tokenizer missing", {"tokenizer.chars", "No such file"},
             [] { remove_one(kFolder + "/tokenizer.chars"); }),
      verify("tokenizer flipped", {"tokenizer.chars", "hash"},
             [] { flip_bit(kFolder + "/tokenizer.chars", -2); }),
      {.name = "checkpoint's tokenizer of another vocabulary",
       .line = "sample " + kFolder + " --prompt a",
       .code = ExitCode::kData,
       .words = {"tokenizer.chars"},
       .spoil =
           [] {
             write_bytes(kFolder + "/tokenizer.chars", "birkhoff chars 1\nunknown no\n61\n62\n");
             accept_file(kFolder, kFolder + "/tokenizer.chars");
           }},
  };
}

// Changes the header of the model's safetensors file and makes its hash match.
std::function<void()> with_header(std::function<void(std::string&)> change) {
  return [change = std::move(change)] {
    const std::string file = model();
    const std::string bytes = read_bytes(file);
    std::uint64_t length = 0;
    bytes.copy(reinterpret_cast<char*>(&length), sizeof length);
    std::string header = bytes.substr(8, length);
    change(header);
    const std::uint64_t now = header.size();
    write_bytes(file, std::string(reinterpret_cast<const char*>(&now), sizeof now) + header +
                          bytes.substr(8 + length));
    accept_file(kFolder, file);
  };
}

std::function<void()> replaced(const std::string& from, const std::string& to) {
  return with_header([=](std::string& header) {
    const std::size_t at = header.find(from);
    if (at == std::string::npos) throw std::runtime_error("no '" + from + "' in " + header);
    header.replace(at, from.size(), to);
  });
}

std::vector<BadInput> accepted_files() {
  return {
      verify("accepted, a model's bit flipped", {"model-", "CRC32C"},
             [] {
               flip_bit(model(), -1);
               accept_file(kFolder, model());
             }),
      verify("accepted, header longer than the file", {"model-", "header of"},
             [] {
               flip_bit(model(), 6);
               accept_file(kFolder, model());
             }),
      verify("accepted, header no JSON", {"model-", "safetensors"}, replaced("{", "[")),
      verify("accepted, header cut", {"model-", "JSON"},
             with_header([](std::string& header) { header.resize(header.size() / 2); })),
      verify("accepted, tensor of another name", {"model-", "embedding.weight"},
             replaced("embedding.weight", "embedding.height")),
      verify("accepted, tensor of another dtype", {"model-", "dtype"},
             replaced("\"F32\"", "\"F33\"")),
      verify("accepted, tensor of another size", {"model-", "fit"},
             replaced("\"shape\":[", "\"shape\":[2,")),
      verify("accepted, tensor of a negative size", {"model-", "integer"},
             replaced("\"shape\":[", "\"shape\":[-1,")),
      verify("accepted, tensors that overlap", {"model-"},
             replaced("\"data_offsets\":[0", "\"data_offsets\":[1")),
      verify("accepted, file of eight bytes", {"model-"},
             [] {
               write_bytes(model(), "12345678");
               accept_file(kFolder, model());
             }),
      verify("accepted, a text for a model", {"model-"},
             [] {
               write_bytes(model(), read_bytes("text/one.txt"));
               accept_file(kFolder, model());
             }),
  };
}

BadInput signed_edit(std::string name, std::vector<std::string> words,
                     std::function<void(CheckpointManifest&)> change) {
  return verify("manifest " + name, std::move(words),
                [change = std::move(change)] { edit_checkpoint(kFolder, change); });
}

// Undamaged checkpoints of a run that had diverged.
std::vector<BadInput> diverged() {
  const auto with_values = [](std::string name, const std::string& line, std::string words,
                              float value, std::int64_t count) {
    return BadInput{
        .name = "diverged: " + name,
        .line = line,
        .code = ExitCode::kNumerical,
        .words = {"step-00000004", "earlier checkpoint", std::move(words)},
        .spoil = [=] { forge_tensor(kFolder, model(), "embedding.weight", value, count); }};
  };
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  const std::string parameter = "tensor 'embedding.weight'";
  return {
      as_process_too(with_values("sample of a NaN", "sample run --prompt a", parameter, kNaN, 1)),
      with_values("sample of an infinity", "sample run --prompt a", parameter, kInfinity, 1),
      with_values("sample of a checkpoint of minus infinity", "sample " + kFolder + " --prompt a",
                  parameter, -kInfinity, 1),
      as_process_too(with_values("eval of a NaN", "eval run", parameter, kNaN, 1)),
      with_values("eval of an infinity", "eval " + kFolder + " --json", parameter, kInfinity, 1),
      as_process_too(with_values("eval of numbers that overflow", "eval run",
                                 "the loss on valid is not finite", 1e38f, 200)),
      signed_edit("with a loss that is no number", {"held_out_loss", "not finite"},
                  [](CheckpointManifest& m) { m.set_held_out_loss(kNaN); }),
      signed_edit("with a lowest loss that is no number", {"lowest_loss", "not finite"},
                  [](CheckpointManifest& m) { m.set_lowest_loss(kNaN); }),
      signed_edit("with a negative number of evaluations", {"stale_evaluations", "-1"},
                  [](CheckpointManifest& m) { m.set_stale_evaluations(-1); }),
  };
}

std::vector<BadInput> manifests() {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  return {
      {.name = "checkpoint's manifest missing",
       .line = "verify " + kFolder,
       .words = {"step-00000004", "manifest.json"},
       .spoil = [] { remove_one(kManifest); }},
      as_process_too(verify("manifest truncated", {"manifest", "checksum"},
                            [] { truncate_to(kManifest, 500); })),
      verify("manifest flipped in its checksum", {"manifest", "checksum"},
             [] { flip_bit(kManifest, 20); }),
      verify("manifest flipped in its middle", {"manifest", "checksum"},
             [] { flip_bit(kManifest, 700); }),
      verify("manifest flipped at its end", {"manifest", "checksum"},
             [] { flip_bit(kManifest, -3); }),
      verify("manifest with more behind it", {"manifest", "checksum"},
             [] { append_bytes(kManifest, " "); }),
      verify("manifest of the step before", {"the manifest says"},
             [] {
               write_bytes(kManifest, read_bytes("run/checkpoints/step-00000002/manifest.json"));
               append_bytes(model(), "x");
             }),
      verify("manifest's config text damaged", {"manifest", "checksum"},
             [] { replace_text(kManifest, "\"global_batch\": 4", "\"global_batch\": 8"); }),
      as_process_too(signed_edit("of another version", {"version 3", "reads versions 1 to 2"},
                                 [](CheckpointManifest& m) { m.set_version(3); })),
      signed_edit("of another format", {"format 'birkhoff corpsus'"},
                  [](CheckpointManifest& m) { m.set_format("birkhoff corpsus"); }),
      signed_edit("of no ranks", {"ranks is 0"}, [](CheckpointManifest& m) { m.set_ranks(0); }),
      signed_edit("of a negative step", {"step is -1"},
                  [](CheckpointManifest& m) { m.set_step(-1); }),
      signed_edit("of negative tokens", {"tokens is -7"},
                  [](CheckpointManifest& m) { m.set_tokens(-7); }),
      signed_edit("of negative metrics", {"metrics_bytes"},
                  [](CheckpointManifest& m) { m.set_metrics_bytes(-1); }),
      signed_edit("with a file elsewhere", {"'../../run.json'"},
                  [](CheckpointManifest& m) { m.mutable_file(0)->set_name("../../run.json"); }),
      signed_edit("with a file twice", {"listed twice"},
                  [](CheckpointManifest& m) { m.mutable_file(1)->set_name(m.file(0).name()); }),
      signed_edit("with a file of negative size", {"bytes is -1"},
                  [](CheckpointManifest& m) { m.mutable_file(0)->set_bytes(-1); }),
      signed_edit("with a file without a hash", {"hash"},
                  [](CheckpointManifest& m) { m.mutable_file(0)->clear_hash(); }),
      signed_edit("with a tensor of an unknown dtype", {"'F8'"},
                  [](CheckpointManifest& m) { m.mutable_tensor(0)->set_dtype("F8"); }),
      signed_edit("with a tensor of an unknown kind", {"'gradient'"},
                  [](CheckpointManifest& m) { m.mutable_tensor(0)->set_kind("gradient"); }),
      signed_edit("with a tensor in no file", {"'lost.safetensors'"},
                  [](CheckpointManifest& m) { m.mutable_tensor(0)->set_file("lost.safetensors"); }),
      signed_edit("with a tensor without a name", {"tensor ''"},
                  [](CheckpointManifest& m) { m.mutable_tensor(0)->clear_name(); }),
      signed_edit(
          "with a tensor twice", {"twice"},
          [](CheckpointManifest& m) { *m.add_tensor() = CheckpointManifest::Tensor(m.tensor(0)); }),
      signed_edit("with a tensor's end beyond its box", {"tensor '"},
                  [](CheckpointManifest& m) { m.mutable_tensor(0)->set_flat_end(kHuge); }),
      signed_edit("with a tensor's half", {"elements"},
                  [](CheckpointManifest& m) {
                    m.mutable_tensor(0)->set_flat_end(m.tensor(0).flat_end() / 2);
                  }),
      signed_edit("with a negative dimension", {"tensor '"},
                  [](CheckpointManifest& m) { m.mutable_tensor(0)->set_global_shape(0, -4); }),
      signed_edit("with a dimension that overflows", {"tensor '"},
                  [](CheckpointManifest& m) {
                    m.mutable_tensor(0)->set_global_shape(0, kHuge);
                    m.mutable_tensor(0)->set_box_size(0, kHuge);
                  }),
      signed_edit("with an end mark outside of the vocabulary", {"end_of_document"},
                  [](CheckpointManifest& m) { m.set_end_of_document(m.vocabulary()); }),
      signed_edit("without one of the tensors", {"not in the manifest"},
                  [](CheckpointManifest& m) { m.mutable_tensor()->DeleteSubrange(0, 1); }),
      signed_edit("with another checksum of a tensor", {"CRC32C"},
                  [](CheckpointManifest& m) { m.mutable_tensor(0)->set_crc32c(1); }),
  };
}

// All checksums match, but no model can be loaded.
std::vector<BadInput> misfits() {
  const auto eval = [](std::string name, ExitCode code, std::vector<std::string> words,
                       std::function<void(CheckpointManifest&)> change) {
    return BadInput{.name = "checkpoint misfit: " + name,
                    .line = "eval " + kFolder,
                    .code = code,
                    .words = std::move(words),
                    .spoil = [change = std::move(change)] { edit_checkpoint(kFolder, change); }};
  };
  return {
      eval("more channels", ExitCode::kCheckpoint, {"tensor '", "is needed"},
           [](CheckpointManifest& m) { m.mutable_config()->mutable_model()->set_channels(32); }),
      eval("more layers", ExitCode::kCheckpoint, {"tensor '", "missing"},
           [](CheckpointManifest& m) { m.mutable_config()->mutable_model()->set_layers(2); }),
      eval("shorter sequences", ExitCode::kCheckpoint, {"positions.weight", "is needed"},
           [](CheckpointManifest& m) {
             m.mutable_config()->mutable_data()->set_sequence_length(16);
           }),
      eval("another precision", ExitCode::kCheckpoint, {"F32", "F64", "is needed"},
           [](CheckpointManifest& m) {
             m.mutable_config()->mutable_train()->set_precision(configs::Train::fp64);
           }),
      eval("another vocabulary", ExitCode::kData, {"not the model's"},
           [](CheckpointManifest& m) { m.set_vocabulary(m.vocabulary() + 5); }),
      eval("another tokenizer", ExitCode::kData, {"not the model's", "words"},
           [](CheckpointManifest& m) { m.set_tokenizer("words"); }),
      eval("heads that divide nothing", ExitCode::kConfig, {"heads", "3"},
           [](CheckpointManifest& m) { m.mutable_config()->mutable_model()->set_heads(3); }),
      eval("no heads", ExitCode::kConfig, {"manifest.json", "model.heads", "must be in"},
           [](CheckpointManifest& m) { m.mutable_config()->mutable_model()->set_heads(0); }),
      seen_by("sample " + kFolder + " --prompt a",
              eval("no configuration", ExitCode::kConfig, {"manifest.json", "task"},
                   [](CheckpointManifest& m) { m.clear_config(); })),
      eval("a parameter renamed", ExitCode::kCheckpoint, {"tensor '"},
           [](CheckpointManifest& m) {
             for (auto& tensor : *m.mutable_tensor()) {
               if (tensor.name() == "embedding.weight") tensor.set_name("embedding.height");
             }
           }),
      eval("no task", ExitCode::kConfig, {"task"},
           [](CheckpointManifest& m) { m.mutable_config()->clear_task(); }),
      eval(
          "a corpus that is gone", ExitCode::kData, {"nowhere"},
          [](CheckpointManifest& m) { m.mutable_config()->mutable_data()->set_corpus("nowhere"); }),
      {.name = "run without checkpoints, seen by eval",
       .line = "eval run",
       .code = ExitCode::kCheckpoint,
       .words = {"run", "no checkpoint"},
       .spoil =
           [] {
             remove_one("run/checkpoints");
             std::filesystem::create_directory("run/checkpoints");
           }},
      {.name = "run without checkpoints, seen by verify",
       .line = "verify run",
       .code = ExitCode::kCheckpoint,
       .words = {"run", "no checkpoint"},
       .spoil =
           [] {
             remove_one("run/checkpoints");
             std::filesystem::create_directory("run/checkpoints");
           }},
      {.name = "run with one damaged checkpoint, seen by verify",
       .line = "verify run",
       .code = ExitCode::kCheckpoint,
       .words = {"step-00000004", "damaged"},
       .spoil = [] { flip_bit(model(), -1); }},
      {.name = "checkpoints folder a file",
       .line = "eval run",
       .code = ExitCode::kCheckpoint,
       .words = {"run/checkpoints"},
       .spoil =
           [] {
             remove_one("run/checkpoints");
             write_bytes("run/checkpoints", "");
           }},
  };
}

}  // namespace

std::vector<BadInput> bad_checkpoints() {
  std::vector<BadInput> rows;
  for (auto table : {files, accepted_files, diverged, manifests, misfits}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
