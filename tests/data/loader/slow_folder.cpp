// A file system that shows a folder's files, read-only, as a server far away would:
//   slow_folder FOLDER MOUNT MB_PER_SECOND MS_PER_CALL
// Each call that reads takes MS_PER_CALL milliseconds, any number of them at once, and all of them
// together get MB_PER_SECOND megabytes (10^6 bytes) a second. As with NFS, Lustre and other clients
// in the kernel, pages that were read stay in the page cache, and the system may read ahead, also
// what posix_fadvise() announces; names and attributes stay known. It serves until it gets SIGTERM.
// Then it unmounts and prints how many reads it served, and how many of them were in flight at
// once.
#define FUSE_USE_VERSION 312
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fuse.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

std::string folder;
double bytes_per_second;
Seconds delay;

std::mutex mutex;             // guards the rest
Clock::time_point link_free;  // when all bytes asked for so far are transferred
int reads_in_flight, most_in_flight;
std::int64_t num_reads, num_bytes;

int result_of(int status) { return status < 0 ? -errno : 0; }

int get_attributes(const char* path, struct stat* attributes, fuse_file_info*) {
  return result_of(lstat((folder + path).c_str(), attributes));
}

int list_folder(const char* path, void* list, fuse_fill_dir_t fill, off_t, fuse_file_info*,
                fuse_readdir_flags) {
  const std::unique_ptr<DIR, int (*)(DIR*)> names(opendir((folder + path).c_str()), closedir);
  if (!names) return -errno;
  while (const dirent* name = readdir(names.get())) {
    fill(list, name->d_name, nullptr, 0, fuse_fill_dir_flags{});
  }
  return 0;
}

int open_file(const char* path, fuse_file_info* file) {
  const int fd = open((folder + path).c_str(), file->flags);
  file->fh = static_cast<std::uint64_t>(fd);
  return result_of(fd);
}

int release_file(const char*, fuse_file_info* file) {
  return result_of(close(static_cast<int>(file->fh)));
}

int read_file(const char*, char* out, std::size_t size, off_t offset, fuse_file_info* file) {
  Clock::time_point done;
  {
    const std::lock_guard lock(mutex);
    link_free = std::max(link_free, Clock::now()) +
                std::chrono::duration_cast<Clock::duration>(
                    Seconds(static_cast<double>(size) / bytes_per_second));
    done = link_free + std::chrono::duration_cast<Clock::duration>(delay);
    most_in_flight = std::max(most_in_flight, ++reads_in_flight);
    ++num_reads;
    num_bytes += static_cast<std::int64_t>(size);
  }
  const ssize_t got = pread(static_cast<int>(file->fh), out, size, offset);
  const int result = got < 0 ? -errno : static_cast<int>(got);
  std::this_thread::sleep_until(done);
  const std::lock_guard lock(mutex);
  --reads_in_flight;
  return result;
}

void* start(fuse_conn_info* connection, fuse_config* config) {
  connection->max_background = 4096;  // reads ahead; the usual limit is 12
  connection->congestion_threshold = 4096;
  config->kernel_cache = 1;
  config->entry_timeout = config->attr_timeout = 3600;
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    fmt::print(stderr, "usage: slow_folder FOLDER MOUNT MB_PER_SECOND MS_PER_CALL\n");
    return 2;
  }
  folder = argv[1];
  bytes_per_second = std::atof(argv[3]) * 1e6;
  delay = Seconds(std::atof(argv[4]) / 1e3);

  fuse_operations operations{};
  operations.getattr = get_attributes;
  operations.readdir = list_folder;
  operations.open = open_file;
  operations.release = release_file;
  operations.read = read_file;
  operations.init = start;
  // A read takes a thread as long as it lasts.
  std::string options = "ro,fsname=slow_folder,max_threads=4096,max_idle_threads=4096";
  std::string name = argv[0], foreground = "-f", option = "-o", mount = argv[2];
  char* arguments[] = {name.data(), foreground.data(), option.data(), options.data(), mount.data()};
  const int status = fuse_main(std::size(arguments), arguments, &operations, nullptr);
  fmt::print("slow_folder: {} reads of {:.1f} MB in all, at most {} in flight\n", num_reads,
             static_cast<double>(num_bytes) / 1e6, most_in_flight);
  return status;
}
