// The readers of image files and the resizing of images.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <png.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>

#include "cluster/base/files/sandboxed_child.h"
#include "data/images/image_array.h"
#include "data/images/image_decoder.h"
#include "data/images/picture.h"
#include "data/images/resize.h"
#include "tests/data/helpers.h"
#include "tests/data/images/image_files.h"
#include "tests/data/text/packed_bytes.h"
#include "tests/peak_memory.h"
#include "tests/sample_data.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using Bytes = std::vector<std::uint8_t>;

// What the std::invalid_argument says that `body` must throw.
std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "not refused";
}

TEST(Png, KeepsEveryValue) {
  for (const int channels : {1, 3}) {
    const Image image = pattern(5, 9, channels);
    const Image back = read_picture(png_of(image));
    EXPECT_EQ(back.shape, image.shape);
    EXPECT_EQ(back.pixels, image.pixels);
  }
  const Image image = pattern(9, 7, 3);
  const PngKind interlaced = {.color_type = PNG_COLOR_TYPE_RGB, .bit_depth = 8, .interlaced = true};
  EXPECT_EQ(read_png(png_of(interlaced, 9, 7, image.pixels)).pixels, image.pixels);
}

TEST(Png, OtherKindsBecomeGrayOrColorOf8Bits) {
  // 1 and 4 bits of gray are scaled to 8: 0 and 255; n * 17.
  const Image bits = read_png(png_of({PNG_COLOR_TYPE_GRAY, 1}, 1, 8, {0b10110001}));
  EXPECT_THAT(bits.pixels, ElementsAre(255, 0, 255, 255, 0, 0, 0, 255));
  EXPECT_EQ(bits.shape.channels, 1);
  EXPECT_THAT(read_png(png_of({PNG_COLOR_TYPE_GRAY, 4}, 1, 2, {0x3f})).pixels,
              ElementsAre(51, 255));
  // 16 bits: v / 257, rounded.
  EXPECT_THAT(read_png(png_of({PNG_COLOR_TYPE_GRAY, 16}, 1, 3, {0, 128, 0, 129, 255, 255})).pixels,
              ElementsAre(0, 1, 255));
  const Bytes palette = {1, 2, 3, 40, 50, 60};
  const Image colors = read_png(png_of({PNG_COLOR_TYPE_PALETTE, 8, palette}, 1, 3, {1, 0, 1}));
  EXPECT_EQ(colors.shape, (ImageShape{{1, 3}, 3}));
  EXPECT_THAT(colors.pixels, ElementsAre(40, 50, 60, 1, 2, 3, 40, 50, 60));
}

TEST(Png, AlphaMustBeOpaque) {
  const Image opaque =
      read_png(png_of({PNG_COLOR_TYPE_RGB_ALPHA, 8}, 1, 2, {1, 2, 3, 255, 4, 5, 6, 255}));
  EXPECT_THAT(opaque.pixels, ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(read_png(png_of({PNG_COLOR_TYPE_GRAY_ALPHA, 8}, 1, 1, {9, 255})).pixels, Bytes{9});
  EXPECT_THAT(refusal([] {
                read_png(png_of({PNG_COLOR_TYPE_GRAY_ALPHA, 8}, 1, 1, {9, 254}));
              }),
              HasSubstr("transparent"));
  const PngKind palette = {PNG_COLOR_TYPE_PALETTE, 8, {1, 2, 3, 4, 5, 6}, {255, 0}};
  EXPECT_EQ(read_png(png_of(palette, 1, 1, {0})).pixels, (Bytes{1, 2, 3}));
  EXPECT_THAT(refusal([&] { read_png(png_of(palette, 1, 1, {1})); }), HasSubstr("transparent"));
}

TEST(Png, DamageAtAnyByteIsRefusedOrHarmless) {
  const Image image = pattern(20, 20, 3);
  const std::string good = png_of(image);
  int refused = 0;
  for (std::size_t at = 8; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    // The checksums of chunks find all damage to pixels.
    refused +=
        refusal([&] { EXPECT_EQ(read_png(bad).pixels, image.pixels) << at; }) != "not refused";
  }
  EXPECT_GT(refused, static_cast<int>(good.size()) - 30);
  for (std::size_t size = 8; size < good.size(); ++size)
    EXPECT_THAT(refusal([&] { read_png(good.substr(0, size)); }), HasSubstr("PNG: ")) << size;
}

TEST(Jpeg, IsReadUpToItsLoss) {
  for (const int channels : {1, 3}) {
    for (const bool progressive : {false, true}) {
      Image smooth{{{16, 24}, channels}, {}};
      for (int i = 0; i < 16 * 24 * channels; ++i)
        smooth.pixels.push_back(static_cast<std::uint8_t>(i * 255 / (16 * 24 * channels)));
      const Image back = read_picture(jpeg_of(smooth, 100, progressive));
      ASSERT_EQ(back.shape, smooth.shape);
      for (std::size_t i = 0; i < back.pixels.size(); ++i)
        ASSERT_NEAR(back.pixels[i], smooth.pixels[i], 4) << i;
    }
  }
}

TEST(Jpeg, LostDataAreRefused) {
  const std::string good = jpeg_of(pattern(40, 40, 3), 90);
  for (std::size_t size = 3; size < good.size(); size += 7)
    EXPECT_THAT(refusal([&] { read_jpeg(good.substr(0, size)); }), HasSubstr("JPEG: ")) << size;
  EXPECT_THAT(refusal([] { read_jpeg(jpeg_of(pattern(8, 8, 4))); }), HasSubstr("CMYK"));
  std::string unsupported = good;  // of the hierarchical process
  unsupported.replace(unsupported.find("\xff\xc0"), 2, "\xff\xc5");
  EXPECT_THAT(refusal([&] { read_jpeg(unsupported); }),
              AllOf(HasSubstr("a kind that is not read"), Not(HasSubstr("damaged"))));
  // Bytes between segments, which some cameras leave, lose nothing.
  std::string padded = good;
  padded.insert(padded.size() - 2, std::string(2, '\0'));
  EXPECT_EQ(read_jpeg(padded).pixels, read_jpeg(good).pixels);
}

TEST(Pictures, OtherFormatsAreNamed) {
  EXPECT_THAT(refusal([] { read_picture("GIF89a..."); }), HasSubstr("GIF; convert"));
  EXPECT_THAT(refusal([] { read_picture(std::string("II*\0", 4)); }), HasSubstr("TIFF"));
  EXPECT_THAT(refusal([] { read_picture("hello"); }), HasSubstr("neither PNG nor JPEG"));
  EXPECT_THAT(refusal([] { read_picture(""); }), HasSubstr("empty"));
}

// Expected: Pillow 13.0.0, Image.resize(covering size, BILINEAR), then crop.
TEST(Resizing, AgreesWithPillowWithinALevel) {
  struct Case {
    ImageShape from;
    ImageSize to, covering;
    Bytes expected;
  };
  const std::vector<Case> cases = {
      {{{7, 5}, 3}, {3, 3}, {4, 3}, {102, 112, 64, 123, 168, 129, 136, 147, 168,
                                     122, 151, 68, 155, 109, 137, 143, 133, 152,
                                     95,  67,  82, 139, 91,  143, 184, 82,  170}},
      {{{24, 36}, 1}, {6, 6}, {6, 9}, {117, 122, 110, 122, 135, 131, 123, 114, 116, 114, 123, 130,
                                       125, 119, 119, 111, 117, 129, 139, 125, 120, 113, 111, 123,
                                       107, 132, 122, 119, 111, 119, 130, 145, 127, 125, 110, 112}},
      {{{3, 2}, 1}, {5, 4}, {6, 4}, {0,   35,  104, 138, 8,   45,  118, 153, 25, 65,
                                     145, 184, 55,  83,  137, 164, 100, 98,  96, 94}},
      {{{9, 16}, 3}, {2, 5}, {2, 5}, {136, 106, 143, 121, 103, 127, 142, 101, 132, 129,
                                      117, 123, 101, 129, 102, 134, 116, 134, 118, 96,
                                      126, 108, 130, 140, 111, 111, 120, 97,  139, 146}}};
  for (const Case& c : cases) {
    const Image image = pattern(c.from.size.rows, c.from.size.columns, c.from.channels);
    EXPECT_EQ(covering_size(c.from.size, c.to), c.covering);
    const Image made = resized(image, c.to);
    ASSERT_EQ(made.shape, (ImageShape{c.to, c.from.channels}));
    ASSERT_EQ(made.pixels.size(), c.expected.size());
    for (std::size_t i = 0; i < made.pixels.size(); ++i)
      EXPECT_NEAR(made.pixels[i], c.expected[i], 1) << i;
  }
}

TEST(Resizing, KeepsConstantsAndEqualSizes) {
  Image flat{{{50, 31}, 3}, Bytes(50 * 31 * 3, 201)};
  EXPECT_EQ(resized(flat, {7, 9}).pixels, Bytes(7 * 9 * 3, 201));
  EXPECT_EQ(resized(flat, {200, 90}).pixels, Bytes(200 * 90 * 3, 201));
  const Image image = pattern(12, 12, 3);
  EXPECT_EQ(resized(image, {12, 12}).pixels, image.pixels);
  // Without a change of size, cropping copies pixels.
  const Image crop = resized(image, {12, 8});
  for (std::int64_t y = 0; y < 12; ++y) {
    const auto* row = image.pixels.data() + (y * 12 + 2) * 3;
    EXPECT_EQ(Bytes(row, row + 24),
              Bytes(crop.pixels.data() + y * 24, crop.pixels.data() + (y + 1) * 24));
  }
}

// Expected: Pillow 13.0.0, convert("L").
TEST(Channels, GrayIsPillows) {
  EXPECT_THAT(with_channels(pattern(4, 4, 3), 1).pixels,
              ElementsAre(85, 138, 163, 211, 52, 95, 81, 119, 206, 162, 215, 166, 93, 190, 82, 23));
  EXPECT_THAT(with_channels({{{1, 2}, 1}, {7, 9}}, 3).pixels, ElementsAre(7, 7, 7, 9, 9, 9));
}

// All images and labels of the file.
void expect_array(const std::string& path, const std::vector<Image>& images,
                  const std::vector<std::int64_t>& labels) {
  const auto array = open_image_array(path);
  array->check();
  ASSERT_EQ(array->images(), std::ssize(images));
  EXPECT_EQ(array->labels(), labels);
  for (const std::int64_t i : {std::int64_t{0}, array->images() - 1, std::int64_t{1}}) {
    EXPECT_EQ(array->image(i).shape, images[static_cast<std::size_t>(i)].shape);
    EXPECT_EQ(array->image(i).pixels, images[static_cast<std::size_t>(i)].pixels) << i;
  }
}

TEST(ImageArrays, GiveBackTheirImages) {
  TemporaryFolder folder;
  std::vector<Image> gray, color, small;
  for (int i = 0; i < 5; ++i) {
    gray.push_back(pattern(28, 27, 1, i));
    color.push_back(pattern(32, 32, 3, i));
    small.push_back(pattern(8, 8, 3, i));
  }
  write_text(folder / "x-images-idx3-ubyte", idx_images_of(gray));
  expect_array(folder / "x-images-idx3-ubyte", gray, {});
  write_text(folder / "x-labels-idx1-ubyte", idx_labels_of({3, 1, 4, 1, 255}));
  expect_array(folder / "x-images-idx3-ubyte", gray, {3, 1, 4, 1, 255});
  write_text(folder / "y.images-idx3-ubyte.gz", gzip_of(idx_images_of(gray)));
  write_text(folder / "y.labels-idx1-ubyte.gz", gzip_of(idx_labels_of({0, 1, 2, 3, 4})));
  expect_array(folder / "y.images-idx3-ubyte.gz", gray, {0, 1, 2, 3, 4});
  const std::string idx = idx_images_of(gray);
  write_text(folder / "y.images-idx3-ubyte.gz",
             gzip_of(idx.substr(0, 30)) + gzip_of(idx.substr(30)));
  expect_array(folder / "y.images-idx3-ubyte.gz", gray, {0, 1, 2, 3, 4});
  write_text(folder / "10.bin", cifar_of(color, {{9}, {0}, {1}, {2}, {3}}));
  expect_array(folder / "10.bin", color, {9, 0, 1, 2, 3});
  write_text(folder / "100.bin", cifar_of(color, {{19, 99}, {0, 1}, {1, 2}, {2, 3}, {3, 4}}));
  expect_array(folder / "100.bin", color, {99, 1, 2, 3, 4});
  for (const bool deflated : {false, true}) {
    write_text(folder / "n.npz", npz_of(small, {1, 1000, 5, 6, 7}, deflated));
    expect_array(folder / "n.npz", small, {1, 1000, 5, 6, 7});
    write_text(folder / "n.npz", npz_of(small, {}, deflated));
    expect_array(folder / "n.npz", small, {});
  }
}

TEST(ImageArrays, MnistIsWhatItIs) {
  // Its labels are in another file.
  const auto images = real_data("mnist.t10k-images-idx3-ubyte.gz");
  if (!images || !real_data("mnist.t10k-labels-idx1-ubyte.gz"))
    GTEST_SKIP() << "BIRKHOFF_DATA holds no mnist.t10k-*.gz";
  const auto array = open_image_array(*images);
  EXPECT_EQ(array->images(), 10000);
  EXPECT_EQ(array->shape(), (ImageShape{{28, 28}, 1}));
  std::vector<int> of_class(10);
  for (const std::int64_t label : array->labels()) ++of_class.at(static_cast<std::size_t>(label));
  EXPECT_THAT(of_class, ElementsAre(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009));
  EXPECT_EQ(array->labels().front(), 7);
}

TEST(LimitedChild, AnswersManyRequestsAndOutlivesItsOwnEnd) {
  int calls = 0;  // in the child: a copy
  LimitedChild child(
      [&](const std::string& request) {
        if (request == "end") _exit(0);
        if (request == "crash") raise(SIGSEGV);
        if (request == "hang") {
          while (true) {
          }
        }
        if (request == "take memory") return std::string(std::size_t{1} << 40, 'x').substr(0, 1);
        return fmt::format("{} {}", request, ++calls);
      },
      {.cpu_seconds = 1, .wall_seconds = 20, .more_bytes = 256 << 20});
  std::vector<std::string> requests;
  for (int i = 0; i < 100; ++i) requests.push_back(std::to_string(i));
  requests[40] = "end";
  requests[41] = "crash";
  requests[60] = "hang";
  std::vector<std::string> answers;
  child.answer(requests, [&](std::size_t i, const LimitedChild::Answer& answer) {
    ASSERT_EQ(i, answers.size());
    answers.push_back((answer.ended ? "ended: " : "") + answer.text);
  });
  ASSERT_EQ(answers.size(), 100u);
  EXPECT_EQ(answers[39], "39 40");
  EXPECT_EQ(answers[40], "ended: ended early");
  EXPECT_EQ(answers[41], "ended: ended by signal 11");
  EXPECT_EQ(answers[42], "42 1");  // another child
  EXPECT_EQ(answers[60], "ended: took more than 1 s of processor time");
  EXPECT_EQ(answers[99], "99 39");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_EQ(static_cast<int>(child.answer("take memory").code),
            static_cast<int>(ExitCode::kMemory));
#endif
  EXPECT_EQ(child.answer(std::string(8000, 'a')).text.size(), 8000u + 3);
}

TEST(LimitedChild, TriesOnceMoreIfSomethingOutsideHasEndedIt) {
  TemporaryFolder folder;
  LimitedChild child(
      [&](const std::string& request) {
        const bool is_first = !path_exists(folder / request);
        if (is_first) write_text(folder / request, "");
        if (request == "kill once" && is_first) raise(SIGKILL);
        if (request == "kill") raise(SIGKILL);
        if (request == "terminate") raise(SIGTERM);
        if (request == "sleep") pause();
        return request;
      },
      {.cpu_seconds = 10, .wall_seconds = 1});
  std::vector<std::string> answers;
  std::vector<int> codes;
  child.answer({"1", "kill once", "2", "kill", "terminate", "sleep", "3"},
               [&](std::size_t, const LimitedChild::Answer& answer) {
                 answers.push_back((answer.ended ? "ended: " : "") + answer.text);
                 codes.push_back(static_cast<int>(answer.code));
               });
  EXPECT_THAT(answers, ElementsAre("1", "kill once", "2", "ended: ended by signal 9",
                                   "ended: ended by signal 15", "ended: took more than 1 s", "3"));
  EXPECT_THAT(codes, ElementsAre(0, 0, 0, 10, 6, 6, 0));
}

TEST(LimitedChild, EndsIfItAnnouncesMoreThanItMayHold) {
  LimitedChild child(
      [](const std::string& request) {
        if (request != "lie") return request;
        const std::array<std::uint32_t, 2> header = {0, 0xffffffff};
        // The socket is its only open file but for the standard ones.
        for (int fd = 3; fd < 1024; ++fd) send(fd, header.data(), sizeof header, MSG_NOSIGNAL);
        while (true) pause();
      },
      {.cpu_seconds = 10, .wall_seconds = 20, .more_bytes = 64 << 20});
  std::vector<std::string> answers;
  const std::int64_t before = peak_memory(/*reset=*/true);
  child.answer({"1", "lie", "2"}, [&](std::size_t, const LimitedChild::Answer& answer) {
    answers.push_back((answer.ended ? "ended: " : "") + answer.text);
    EXPECT_EQ(answer.ended, answer.code == ExitCode::kData);
  });
  EXPECT_THAT(answers, ElementsAre("1", "ended: announced an answer of 4294967295 bytes", "2"));
  EXPECT_LT(peak_memory(/*reset=*/false) - before, 64 << 20);
}

TEST(LimitedChild, HasItsLimitsAlsoUnderFiniteHardLimits) {
  const pid_t process = fork();
  ASSERT_GE(process, 0);
  if (process == 0) {
    const rlimit finite = {3600, 3600};
    setrlimit(RLIMIT_CPU, &finite);
    LimitedChild child(
        [](const std::string&) -> std::string {
          while (true) {
          }
        },
        {.cpu_seconds = 1, .wall_seconds = 20});
    const LimitedChild::Answer answer = child.answer("hang");
    _exit(answer.ended && answer.text == "took more than 1 s of processor time" ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(process, &status, 0), process);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(LimitedChild, EndsWithAnUnfinishedAnswer) {
  LimitedChild child([](const std::string& request) { return request + request; });
  EXPECT_THROW(child.answer({"1", "2", "3"},
                            [](std::size_t, const LimitedChild::Answer&) {
                              throw std::runtime_error("no more");
                            }),
               std::runtime_error);
  EXPECT_EQ(child.answer("4").text, "44");
}

}  // namespace
}  // namespace birkhoff
