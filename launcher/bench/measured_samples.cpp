#include "launcher/bench/measured_samples.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cluster/base/error.h"
#include "data/corpus/shard_format.h"
#include "data/corpus/shard_reader.h"
#include "data/loader/token_windows.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

constexpr char kSplit[] = "train", kRows[] = "rows";

at::ScalarType scalar_type(CorpusManifest::Dtype dtype) {
  switch (dtype) {
    case CorpusManifest::u8:
      return at::kByte;
    case CorpusManifest::u16:
      return at::kUInt16;
    case CorpusManifest::i32:
      return at::kInt;
    case CorpusManifest::f32:
      return at::kFloat;
  }
  require(false, "dtype of a record");
  return {};
}

// Rows of a record as they are in the files, of any type and shape.
class RecordRows final : public SampleSource {
 public:
  explicit RecordRows(const Corpus& corpus, const CorpusManifest::Record& record)
      : rows_(corpus, record),
        row_bytes_(shard_format::row_bytes(record)),
        type_(scalar_type(record.dtype())),
        shape_(record.shape().begin(), record.shape().end()) {}

  std::int64_t num_samples() const override { return rows_.elements(); }

  Batch make_batch(std::int64_t rows) const override {
    std::vector<std::int64_t> sizes = {rows};
    sizes.insert(sizes.end(), shape_.begin(), shape_.end());
    Batch batch;
    batch.fields.emplace(kRows, at::empty(sizes, at::TensorOptions(type_)));
    batch.sample_ids_B = at::empty({rows}, at::TensorOptions(at::kLong));
    return batch;
  }

  void will_fill(const std::vector<Row>& rows) override {
    for (const Row& row : rows) rows_.will_read(row.sample, 1);
  }

  void fill(Batch& batch, const std::vector<Row>& rows) override {
    auto* out = static_cast<char*>(batch.at(kRows).mutable_data_ptr());
    auto* sample_ids = batch.sample_ids_B.mutable_data_ptr<std::int64_t>();
    for (const Row& row : rows) {
      rows_.read_bytes(row.sample, 1, out);
      out += row_bytes_;
      *sample_ids++ = row.id;
    }
  }

 private:
  ShardSequence rows_;
  const std::int64_t row_bytes_;
  const at::ScalarType type_;
  const std::vector<std::int64_t> shape_;
};

template <typename Array>
MeasuredSamples samples_of(const Corpus& corpus, const Array& array) {
  MeasuredSamples samples;
  samples.element_bytes = shard_format::row_bytes(array);
  samples.shards = array.shard();
  for (const auto& shard : array.shard()) samples.files.push_back(corpus.folder() / shard.file());
  return samples;
}

[[noreturn]] void fail_at(const Batch& batch, std::int64_t row, std::int64_t element) {
  fail(ExitCode::kInternal,
       "the loader's sample {} differs from the files at element {}; the corpus or the loader is "
       "damaged",
       batch.sample_ids_B.const_data_ptr<std::int64_t>()[row], element);
}

}  // namespace

MeasuredSamples measured_windows(const Corpus& corpus, std::int64_t length) {
  const CorpusManifest::Stream& stream = corpus.split(kSplit).stream(0);
  const WindowOptions windows{.stream = stream.name(), .sequence_length = length};
  MeasuredSamples samples = samples_of(corpus, stream);
  samples.what =
      fmt::format("windows of {} tokens ({})", length, CorpusManifest::Dtype_Name(stream.dtype()));
  samples.stride = length;
  samples.count = length + 1;
  samples.num_samples = num_training_windows(corpus, windows);
  samples.are_ids = true;
  samples.make_source = [&corpus, windows] { return training_windows(corpus, windows); };
  samples.check_row = [length](const Batch& batch, std::int64_t row, const void* expected) {
    const auto* ids = static_cast<const std::int64_t*>(expected);
    for (const auto& [name, first] : {std::pair(field::kInputs, 0), {field::kTargets, 1}}) {
      const at::Tensor tokens_T = batch.at(name)[row];
      const auto* tokens = tokens_T.const_data_ptr<std::int64_t>();
      const auto* different = std::mismatch(tokens, tokens + length, ids + first).first;
      if (different != tokens + length) fail_at(batch, row, different - tokens + first);
    }
  };
  return samples;
}

MeasuredSamples measured_rows(const Corpus& corpus, const std::string& name) {
  const auto& records = corpus.split(kSplit).record();
  if (name.empty() && records.empty()) {
    fail(ExitCode::kData, "{}: split '{}' has neither a stream nor a record; prepare the corpus",
         corpus.folder().string(), kSplit);
  }
  const CorpusManifest::Record& record =
      !name.empty() ? corpus.record(kSplit, name)
                    : *std::max_element(records.begin(), records.end(), [](auto& a, auto& b) {
                        return shard_format::row_bytes(a) < shard_format::row_bytes(b);
                      });
  if (record.rows() == 0) {
    fail(ExitCode::kData, "{}: record '{}' of split '{}' has no row; prepare more",
         corpus.folder().string(), record.name(), kSplit);
  }
  MeasuredSamples samples = samples_of(corpus, record);
  samples.what =
      fmt::format("rows of '{}', {} [{}]", record.name(),
                  CorpusManifest::Dtype_Name(record.dtype()), fmt::join(record.shape(), ", "));
  samples.stride = samples.count = 1;
  samples.num_samples = record.rows();
  samples.make_source = [&corpus, &record] { return std::make_unique<RecordRows>(corpus, record); };
  samples.check_row = [bytes = samples.bytes()](const Batch& batch, std::int64_t row,
                                                const void* expected) {
    const at::Tensor values = batch.at(kRows)[row];
    const auto* seen = static_cast<const char*>(values.const_data_ptr());
    const auto* wanted = static_cast<const char*>(expected);
    const auto* different = std::mismatch(seen, seen + bytes, wanted).first;
    if (different != seen + bytes)
      fail_at(batch, row, (different - seen) / static_cast<std::int64_t>(values.element_size()));
  };
  return samples;
}

PlainReader::PlainReader(const MeasuredSamples& samples)
    : element_bytes_(samples.element_bytes),
      stride_(samples.stride),
      count_(samples.count),
      are_ids_(samples.are_ids),
      bytes_(static_cast<std::size_t>(samples.bytes())) {
  std::int64_t elements = 0;
  for (int i = 0; i < samples.shards.size(); ++i) {
    const std::string path = samples.files[static_cast<std::size_t>(i)];
    const auto& shard = samples.shards.at(i);
    shards_.push_back(
        {File::open_for_read(path), elements, elements + shard.elements(), shard.values_offset()});
    elements += shard.elements();
  }
}

void PlainReader::widen(std::int64_t count, std::int64_t* out) const {
  const auto copy = [&](const auto* ids) { std::copy(ids, ids + count, out); };
  if (element_bytes_ == 1) return copy(reinterpret_cast<const std::uint8_t*>(bytes_.data()));
  if (element_bytes_ == 2) return copy(reinterpret_cast<const std::uint16_t*>(bytes_.data()));
  copy(reinterpret_cast<const std::int32_t*>(bytes_.data()));
}

void PlainReader::read(std::int64_t sample, void* out) {
  auto* next = static_cast<char*>(out);
  std::int64_t first = sample * stride_;
  for (const std::int64_t end = first + count_; first < end;) {
    const Shard& shard =
        *(std::ranges::upper_bound(shards_, first, {}, [](const Shard& s) { return s.begin; }) - 1);
    const std::int64_t count = std::min(end, shard.end) - first;
    const std::int64_t bytes = count * element_bytes_;
    shard.file.pread_exact(are_ids_ ? bytes_.data() : next, static_cast<std::size_t>(bytes),
                           shard.offset + (first - shard.begin) * element_bytes_);
    if (are_ids_) widen(count, reinterpret_cast<std::int64_t*>(next));
    next += are_ids_ ? 8 * count : bytes;
    first += count;
  }
}

double drop_from_cache(const std::vector<std::filesystem::path>& files) {
  std::int64_t pages = 0, stayed = 0;
  for (const std::filesystem::path& path : files) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail(ExitCode::kStorage, "open of '{}': {}", path.string(), std::strerror(errno));
    ::fdatasync(fd);  // pages that are not on the disk yet cannot be dropped
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    const auto size = static_cast<std::size_t>(std::filesystem::file_size(path));
    void* const map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    if (map == MAP_FAILED) continue;
    std::vector<unsigned char> present((size + 4095) / 4096);
    if (::mincore(map, size, present.data()) == 0) {
      pages += std::ssize(present);
      stayed += std::ranges::count_if(present, [](unsigned char page) { return page % 2 == 1; });
    }
    ::munmap(map, size);
  }
  return static_cast<double>(stayed) / static_cast<double>(std::max<std::int64_t>(1, pages));
}

}  // namespace birkhoff
