// Bad input of `prepare --points`: flags, files, and files that do not fit together.
#include <limits>

#include "tests/data/points/point_files.h"
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

constexpr char kFile[] = "in/1.h5";

// prepare --points with these options of a folder "in" with these files, besides a good one.
BadInput points(std::string name, ExitCode code, const std::string& options,
                std::vector<std::string> words,
                const std::map<std::string, std::string>& files = {}) {
  return {.name = "points " + name,
          .line = "prepare --out new --points --valid 0 " + options,
          .code = code,
          .words = std::move(words),
          .spoil = [=] {
            write_bytes("in/0.h5", modelnet_of(point_values(2, 4, 3), 4, 3, {0, 1}));
            for (const auto& [file, bytes] : files) write_bytes(file, bytes);
          }};
}

// One bad file.
BadInput data(std::string name, const std::string& bytes, std::vector<std::string> words) {
  words.emplace_back("in/1.h5: ");
  words.emplace_back("--skip-damaged");
  return points(std::move(name), ExitCode::kData, "in", std::move(words), {{kFile, bytes}});
}

// A data set `data` of 2 x 4 x 3 values and a data set `label`, unless their types are changed.
std::string file_of(const Hdf5DataSet& first, const Hdf5DataSet& second) {
  std::vector<Hdf5DataSet> data_sets = {first, second};
  return hdf5_image(data_sets);
}

std::vector<BadInput> flags() {
  return {
      as_process_too(points("with a tokenizer", ExitCode::kUsage, "--tokenizer chars in",
                            {"--tokenizer", "--points"})),
      points("and images", ExitCode::kUsage, "--images in", {"--images", "--points"}),
      points("with a size of images", ExitCode::kUsage, "--image-size 4 in", {"--image-size"}),
      points("with --vocab-size", ExitCode::kUsage, "--vocab-size 300 in",
             {"--vocab-size is for text", "--points"}),
      points("from standard input", ExitCode::kUsage, "-", {"-: point sets", "pipe"}),
      points("without files", ExitCode::kUsage, "text", {"no point sets", "text"}),
      points("in a list that names a missing file", ExitCode::kUsage, "in/files.txt",
             {"in/files.txt: names 'data/2.h5'", "no in/2.h5"}, {{"in/files.txt", "data/2.h5\n"}}),
      points("in a list that is empty", ExitCode::kUsage, "--test in/files.txt --train in/0.h5",
             {"in/files.txt: names no file"}, {{"in/files.txt", "\n"}}),
      points("like a corpus with other classes", ExitCode::kData, "--like labels in",
             {"in/0.h5: the label 'bed' is none of", "--like"},
             {{"in/shape_names.txt", "bed\nsofa\n"}}),
  };
}

std::vector<BadInput> files() {
  static const std::vector<float> values = point_values(2, 4, 3);
  static const std::vector<std::uint8_t> labels = {0, 1, 2};
  const auto with = [](float value) {
    std::vector<float> changed = values;
    changed[13] = value;
    return modelnet_of(changed, 4, 3, {0, 1});
  };
  static const std::vector<std::int32_t> negative = {0, -1};
  const Hdf5DataSet good{"data", Hdf5Type::kF32, {2, 4, 3}, values.data()},
      label{"label", Hdf5Type::kU8, {2, 1}, labels.data()};
  const std::string whole = file_of(good, label);
  return {
      data("no HDF5", "points", {"is not HDF5"}),
      data("empty", "", {"is not HDF5"}),
      data("cut", whole.substr(0, whole.size() / 2), {"is not HDF5, or is damaged"}),
      data("without coordinates",
           file_of({"points", Hdf5Type::kF32, {2, 4, 3}, values.data()}, label),
           {"has no data set 'data'"}),
      points("without labels", ExitCode::kUsage, "in",
             {"in/1.h5: has no class, but in/0.h5 has; add the data set `label`", "--unlabeled"},
             {{kFile, file_of(good, {"labels", Hdf5Type::kU8, {2, 1}, labels.data()})}}),
      data("of two dimensions", file_of({"data", Hdf5Type::kF32, {2, 12}, values.data()}, label),
           {"'data' has 2 dimensions, not 3"}),
      data("of integers", file_of({"data", Hdf5Type::kI32, {2, 4, 3}, values.data()}, label),
           {"'data' is not of 32-bit floating-point numbers"}),
      data("with labels of another type",
           file_of(good, {"label", Hdf5Type::kF32, {2, 1}, values.data()}),
           {"'label' is not of integers"}),
      data("with more labels than sets",
           file_of(good, {"label", Hdf5Type::kU8, {3, 1}, labels.data()}),
           {"'label' has 3 labels for 2 sets"}),
      data("with fewer labels than sets",
           file_of(good, {"label", Hdf5Type::kU8, {1, 1}, labels.data()}),
           {"'label' has 1 labels for 2 sets"}),
      data("with two labels of a set",
           file_of(good, {"label", Hdf5Type::kU8, {1, 2}, labels.data()}),
           {"'label' has 2 labels of a set, not 1"}),
      data("with a negative label",
           file_of(good, {"label", Hdf5Type::kI32, {2, 1}, negative.data()}),
           {"the label -1 of set 1"}),
      data("without sets", file_of({"data", Hdf5Type::kF32, {0, 4, 3}, values.data()}, label),
           {"'data' is empty (0 x 4 x 3)"}),
      data("with NaN", with(std::numeric_limits<float>::quiet_NaN()),
           {"coordinate 1 of point 0 of set 1 is nan"}),
      data("with infinity", with(std::numeric_limits<float>::infinity()),
           {"coordinate 1 of point 0 of set 1 is inf"}),
      points("with a label without a name", ExitCode::kData, "in",
             {"in/0.h5: a set has the label 1, but in/shape_names.txt names 1 class"},
             {{"in/shape_names.txt", "bed\n"}}),
      points("with the same name twice", ExitCode::kData, "in",
             {"in/shape_names.txt: class_name 'bed' is used twice"},
             {{"in/shape_names.txt", "bed\nbed\n"}}),
      points("of another shape", ExitCode::kUsage, "in",
             {"in/1.h5: has sets of 2 x 3, but in/0.h5 has 4 x 3"},
             {{kFile, modelnet_of(point_values(2, 2, 3), 2, 3, {0, 1})}}),
      points("of other classes", ExitCode::kUsage, "in",
             {"in/x/1.h5: shape_names.txt differs from the one of in/0.h5"},
             {{"in/shape_names.txt", "bed\nsofa\n"},
              {"in/x/shape_names.txt", "bed\ntable\n"},
              {"in/x/1.h5", whole}}),
      points("without names of classes", ExitCode::kUsage, "in",
             {"in/x/1.h5: has no shape_names.txt next to it, but in/0.h5 has one"},
             {{"in/shape_names.txt", "bed\nsofa\n"}, {"in/x/1.h5", whole}}),
      points("none readable", ExitCode::kData, "--skip-damaged bad",
             {"bad: none of 1 file can be read", "bad/1.h5: is not HDF5"},
             {{"bad/1.h5", "points"}}),
  };
}

}  // namespace

std::vector<BadInput> bad_points() {
  std::vector<BadInput> rows = flags();
  for (BadInput& row : files()) rows.push_back(std::move(row));
  return rows;
}

}  // namespace birkhoff
