// Bad input of `prepare --images`: flags, image files, and images that do not fit together.
#include <png.h>

#include "tests/data/images/image_files.h"
#include "tests/data/text/packed_bytes.h"
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

// prepare --images with these options of a folder "in" with these files, besides a good one.
BadInput images(std::string name, ExitCode code, const std::string& options,
                std::vector<std::string> words, const std::map<std::string, std::string>& files) {
  return {.name = "images " + name,
          .line = "prepare --out new --images --valid 0 " + options,
          .code = code,
          .words = std::move(words),
          .spoil = [=] {
            write_bytes("in/0.png", png_of(pattern(4, 4, 3)));
            for (const auto& [file, bytes] : files) write_bytes(file, bytes);
          }};
}

BadInput usage(std::string name, const std::string& options, std::vector<std::string> words,
               const std::map<std::string, std::string>& files = {}) {
  return images(std::move(name), ExitCode::kUsage, options, std::move(words), files);
}

// One bad file.
BadInput data(std::string name, const std::string& file, const std::string& bytes,
              std::vector<std::string> words) {
  words.push_back(file + ": ");
  return images(std::move(name), ExitCode::kData, file, std::move(words), {{file, bytes}});
}

BadInput flag(std::string name, const std::string& line, std::vector<std::string> words) {
  return {.name = "images " + name, .line = "prepare " + line, .words = std::move(words)};
}

std::string part(const std::string& bytes, std::size_t size) { return bytes.substr(0, size); }

std::string replaced(std::string bytes, std::size_t at, const std::string& by) {
  return bytes.replace(at, by.size(), by);
}

std::vector<BadInput> flags() {
  return {
      as_process_too(usage("--image-size a word", "--image-size big in", {"--image-size big"})),
      usage("--image-size 0", "--image-size 0 in", {"--image-size 0", "from 1"}),
      usage("--image-size too large", "--image-size 9000 in", {"--image-size 9000", "8192"}),
      usage("--image-size of three", "--image-size 4x4x3 in", {"--image-size 4x4x3"}),
      usage("--channels 2", "--channels 2 in", {"--channels"}),
      usage("with a tokenizer", "--tokenizer chars in", {"--tokenizer", "--images"}),
      usage("with --vocab-size", "--vocab-size 300 in", {"--vocab-size is for text"}),
      usage("with columns", "--text-column 1 --label-column 2 in", {"--text-column is for text"}),
      usage("like a corpus without classes", "--like corpus in", {"--like corpus", "no classes"}),
      usage("like a corpus, but --unlabeled", "--like labels --unlabeled in",
            {"--like labels", "--unlabeled", "leave one out"}),
      usage("like a corpus, but without classes", "--like labels in",
            {"in: no image has a class", "--like"}),
      usage("from standard input", "-", {"-: ", "pipe"}),
      usage("without images", "text", {"no images", "train", "text"}),
      usage("in the output's folder", "new/0.png", {"new/0.png", "lies in --out"},
            {{"new/0.png", png_of(pattern(4, 4, 3))}}),
      flag("--image-size of text", "--out new --image-size 4 text", {"--image-size", "--images"}),
      flag("--skip-damaged of text", "--out new --skip-damaged text",
           {"--skip-damaged", "--images"}),
  };
}

std::vector<BadInput> unfit() {
  const std::string small = png_of(pattern(3, 4, 3)), good = png_of(pattern(4, 4, 3));
  return {
      usage("of two sizes", "in", {"in/1.png: has 3 x 4", "in/0.png has 4 x 4", "--image-size"},
            {{"in/1.png", small}}),
      usage("of gray and color", "in", {"in/1.png: has 1 channel", "in/0.png", "--channels"},
            {{"in/1.png", png_of(pattern(4, 4, 1))}}),
      usage("idx of another size", "in", {"in/1-idx3-ubyte: has 2 x 2 pixels", "in/0.png"},
            {{"in/1-idx3-ubyte", idx_images_of({pattern(2, 2, 1)})}}),
      usage("with and without a class", "in", {"in/0.png: has no class", "in/a/1.png"},
            {{"in/a/1.png", good}}),
      images("of one class", ExitCode::kData, "pets", {"pets: every image", "'cat'", "--unlabeled"},
             {{"pets/cat/1.png", good}}),
      images("of a class of --like", ExitCode::kData, "--like labels pets",
             {"pets/cat/1.png: the label 'cat'", "--like"},
             {{"pets/cat/1.png", good}, {"pets/dog/1.png", good}}),
      usage("too few for a split", "--test 0.1 in",
            {"in: the train split gets nothing", "1 image"}),
      images("none readable", ExitCode::kData, "--skip-damaged bad", {"bad: none of 1 image"},
             {{"bad/1.png", "no image"}}),
      images("no file readable", ExitCode::kData, "--skip-damaged bad",
             {"bad: none of 2 files can be read", "bad/1.npz: damaged npz"},
             {{"bad/1.npz", "PK\x03\x04"}, {"bad/2.npz", "PK\x03\x04"}}),
  };
}

std::vector<BadInput> pictures() {
  const std::string png = png_of(pattern(9, 9, 3)), jpeg = jpeg_of(pattern(20, 20, 3), 90);
  return {
      data("PNG, empty", "in/1.png", "", {"empty", "--skip-damaged"}),
      data("PNG, a text", "in/1.png", "no image", {"neither PNG nor JPEG"}),
      data("PNG, a GIF", "in/1.png", "GIF89a", {"GIF", "convert"}),
      data("PNG, cut in its header", "in/1.png", part(png, 20), {"damaged PNG", "early"}),
      data("PNG, cut in its pixels", "in/1.png", part(png, png.size() - 40), {"damaged PNG"}),
      data("PNG, without its end", "in/1.png", part(png, png.size() - 12), {"damaged PNG"}),
      data("PNG, with a damaged pixel", "in/1.png", replaced(png, 60, "?"), {"damaged PNG"}),
      data("PNG, with another size in its header", "in/1.png", replaced(png, 16, "1"),
           {"damaged PNG", "IHDR"}),
      data("PNG, too large", "in/1.png",
           png_of({PNG_COLOR_TYPE_GRAY, 1}, 8192, 8193, std::vector<std::uint8_t>(8192 * 1025)),
           {"8192 x 8193 pixels are too many"}),
      data("PNG, with transparency", "in/1.png",
           png_of({PNG_COLOR_TYPE_GRAY_ALPHA, 8}, 1, 1, {9, 0}), {"transparent"}),
      data("JPEG, cut in its header", "in/1.jpg", part(jpeg, 40), {"damaged JPEG"}),
      data("JPEG, cut in its pixels", "in/1.jpg", part(jpeg, jpeg.size() / 2), {"damaged JPEG"}),
      data("JPEG, CMYK", "in/1.jpg", jpeg_of(pattern(8, 8, 4)), {"CMYK", "convert"}),
  };
}

std::vector<BadInput> arrays() {
  const std::string idx = idx_images_of({pattern(3, 3, 1), pattern(3, 3, 1)});
  const std::string name = "in/x-images-idx3-ubyte", packed = gzip_of(idx);
  const auto with_labels = [&](std::string what, const std::string& labels,
                               std::vector<std::string> words) {
    words.push_back(name + ": ");
    return images(std::move(what), ExitCode::kData, name, std::move(words),
                  {{name, idx}, {"in/x-labels-idx1-ubyte", labels}});
  };
  const std::vector<Image> one = {pattern(32, 32, 3)}, tiny = {pattern(2, 2, 3)};
  const std::string npz = npz_of(tiny, {1}), pixels(12, 'x');
  const auto arrays_of = [](const std::string& data_array, const std::string& labels) {
    return zip_of({{"data.npy", data_array}, {"labels.npy", labels}});
  };
  const std::string label = npy_of("<i8", "(1,)", std::string(8, '\0'));
  return {
      data("idx, cut in its header", name, part(idx, 10), {"damaged idx", "header"}),
      data("idx, cut in its images", name, part(idx, 30), {"damaged idx", "30 bytes"}),
      data("idx, with more", name, idx + "more", {"damaged idx", "38 bytes"}),
      data("idx, without images", name, replaced(idx, 4, std::string(4, '\0')), {"without images"}),
      data("idx, of no size", name, replaced(idx, 8, std::string(4, '\0')), {"0 x 3"}),
      data("idx, labels alone", "in/x-labels-idx1-ubyte", idx_labels_of({1}),
           {"give their images"}),
      with_labels("idx, with too few labels", idx_labels_of({1}), {"hold 1", "2 images"}),
      with_labels("idx, with images as labels", idx, {"no idx file of labels"}),
      data("idx, cut in its gzip data", name + ".gz", part(packed, packed.size() - 9), {"early"}),
      data("idx, with damaged gzip data", name + ".gz", replaced(packed, packed.size() - 7, "?"),
           {"gzip", "check"}),
      data("gzip of a text", "in/1-idx3-ubyte.gz", gzip_of("no image"), {"neither PNG"}),
      data("CIFAR, cut", "in/1.bin", part(cifar_of(one, {{1}}), 3000), {"neither PNG", "3073"}),
      data("CIFAR-10 with a label of 10", "in/1.bin", cifar_of(one, {{10}}), {"label 10"}),
      data("CIFAR-100 with a label of 100", "in/1.bin", cifar_of(one, {{1, 100}}), {"label 100"}),
      data("npz, cut", "in/1.npz", part(npz, npz.size() - 30), {"damaged npz"}),
      data("npz, with a wrong checksum", "in/1.npz",
           zip_of({{"data.npy", npy_of("|u1", "(1, 12)", pixels)}}, true, true),
           {"damaged npz", "'data'"}),
      data("npz, without data", "in/1.npz", zip_of({{"labels.npy", label}}), {"data.npy"}),
      data("npz, of floats", "in/1.npz",
           arrays_of(npy_of("<f4", "(1, 12)", std::string(48, 'x')), label), {"'data' is <f4"}),
      data("npz, of rows that are no squares", "in/1.npz",
           arrays_of(npy_of("|u1", "(1, 15)", std::string(15, 'x')), label), {"3 side^2"}),
      data("npz, shorter than its header says", "in/1.npz",
           arrays_of(npy_of("|u1", "(2, 12)", pixels), npy_of("<i8", "(2,)", std::string(16, 0))),
           {"'data' ends early"}),
      data("npz, with too few labels", "in/1.npz",
           arrays_of(npy_of("|u1", "(2, 12)", pixels + pixels), label), {"'labels'", "2 images"}),
      data("npz, with labels of another type", "in/1.npz",
           arrays_of(npy_of("|u1", "(1, 12)", pixels), npy_of("<f8", "(1,)", std::string(8, 'x'))),
           {"'labels' is <f8"}),
      data("npz, with a negative label", "in/1.npz", npz_of(tiny, {-1}),
           {"image 0 is negative or above"}),
      data("npz, in Fortran's order", "in/1.npz",
           arrays_of(replaced(npy_of("|u1", "(1, 12)", pixels), 10,
                              "{'descr': '|u1', 'fortran_order': True, 'shape': (1, 12), }  "),
                     label),
           {"Fortran"}),
  };
}

}  // namespace

std::vector<BadInput> bad_images() {
  std::vector<BadInput> rows;
  for (auto table : {flags, unfit, pictures, arrays}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
