#include "tests/crash/crash_states.h"

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>

#include "cluster/base/files/checksum.h"
#include "tests/crash/file_versions.h"

namespace birkhoff {
namespace {

using Kind = IoEvent::Kind;

constexpr int kRandomStatesPerCut = 6;
constexpr int kRoot = 0;
constexpr int kNothing = -1;

struct Inode {
  bool is_folder = false;
  std::map<std::string, int> names;       // of a folder, durable
  std::map<std::string, int> live_names;  // of a folder, as seen by programs
  Content content;                        // of a file, durable
  std::vector<ByteChange> changes;        // of a file, not durable
};

// An unsynced operation on names: the inode that each name refers to after it.
struct NameChange {
  int folder;
  std::string name;
  int inode;  // kNothing: removed
};
struct NameOperation {
  std::size_t event;
  std::vector<NameChange> changes;

  bool touches(int folder) const {
    return std::any_of(changes.begin(), changes.end(),
                       [folder](const NameChange& change) { return change.folder == folder; });
  }
  bool shares_name(const NameOperation& other) const {
    for (const NameChange& a : changes) {
      for (const NameChange& b : other.changes) {
        if (a.folder == b.folder && a.name == b.name) return true;
      }
    }
    return false;
  }
};

class Disk {
 public:
  explicit Disk(const IoTrace& trace) : trace_(trace) {
    inodes_[kRoot].is_folder = true;
    for (const auto& [path, content] : trace.before) {
      const auto [folder, name] = place(path);
      const int inode = make_inode(content == nullptr);
      inodes_[inode].content = content;
      inodes_[folder].names[name] = inodes_[folder].live_names[name] = inode;
    }
  }

  // Applies the next event.
  void step(std::size_t number) {
    const IoEvent& event = trace_.events[number];
    touched_ = kNothing;
    switch (event.kind) {
      case Kind::kOpen:
        return open(number, event);
      case Kind::kWrite:
        return change(number, {number, event.offset, &event.bytes});
      case Kind::kTruncate:
        return change(number, {number, event.offset, nullptr});
      case Kind::kSync:
        return sync(opened_.at(event.opened));
      case Kind::kRename: {
        const auto [from_folder, from] = place(event.path);
        const auto [to_folder, to] = place(event.new_path);
        const int inode = find(event.path);
        return name_operation(number, {{from_folder, from, kNothing}, {to_folder, to, inode}});
      }
      case Kind::kLink: {
        const auto [folder, name] = place(event.new_path);
        return name_operation(number, {{folder, name, find(event.path)}});
      }
      case Kind::kMakeFolder: {
        const auto [folder, name] = place(event.path);
        return name_operation(number, {{folder, name, make_inode(true)}});
      }
      case Kind::kRemoveFile:
      case Kind::kRemoveFolder: {
        const auto [folder, name] = place(event.path);
        return name_operation(number, {{folder, name, kNothing}});
      }
      case Kind::kMark:
        return;
    }
  }

  // The tree with nothing lost.
  FileTree live_tree() const { return tree(Kept(operations_.size(), true), file_versions(true)); }

  // Calls emit(tree, lost) for the states that the header lists, some more than once. lost()
  // describes what is lost.
  template <typename Emit>
  void for_each_state(std::mt19937_64& random, const Emit& emit) const {
    const std::map<int, FileVersion> whole = file_versions(true), synced = file_versions(false);
    const auto try_state = [&](const Kept& kept, const std::map<int, FileVersion>& files) {
      emit(tree(kept, files), [&] { return lost_text(kept, files); });
    };
    const auto try_names = [&](const Kept& kept) {
      try_state(kept, whole);
      try_state(kept, synced);
    };
    const Kept all(operations_.size(), true), none(operations_.size(), false);
    try_names(all);
    try_names(none);
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      Kept kept = all;
      kept[i] = false;
      try_names(without_followers(kept));
      kept = none;
      kept[i] = true;
      try_names(with_predecessors(kept));
      kept = all;
      std::fill(kept.begin() + static_cast<std::ptrdiff_t>(i), kept.end(), false);
      try_names(kept);
    }
    std::map<int, std::vector<FileVersion>> versions;
    for (const auto& [inode, version] : whole) {
      versions[inode] =
          concerns_last_call(inode)
              ? all_file_versions(trace_, inodes_.at(inode).content, inodes_.at(inode).changes)
              : std::vector<FileVersion>{version, synced.at(inode)};
      for (const FileVersion& other : versions[inode]) {
        std::map<int, FileVersion> files = whole;
        files[inode] = other;
        try_state(all, files);
        try_state(none, files);
      }
    }
    for (int i = 0; i < kRandomStatesPerCut; ++i) {
      Kept kept = all;
      for (std::size_t k = 0; k < kept.size(); ++k) kept[k] = random() % 2 == 0;
      kept = without_followers(kept);
      std::map<int, FileVersion> files;
      for (const auto& [inode, possible] : versions) {
        files[inode] = possible[random() % possible.size()];
      }
      try_state(kept, files);
    }
  }

 private:
  int make_inode(bool is_folder) {
    const int number = next_inode_++;
    Inode& inode = inodes_[number];
    inode.is_folder = is_folder;
    if (!is_folder) inode.content = std::make_shared<const std::string>();
    return number;
  }

  // ---- Names as programs see them
  int find(const std::string& path) const {
    int inode = kRoot;
    for (std::size_t at = 0; at < path.size();) {
      const std::size_t slash = std::min(path.find('/', at), path.size());
      const auto& names = inodes_.at(inode).live_names;
      const auto found = names.find(path.substr(at, slash - at));
      if (found == names.end()) return kNothing;
      inode = found->second;
      at = slash + 1;
    }
    return inode;
  }
  // The folder that contains a path, and its name there.
  std::pair<int, std::string> place(const std::string& path) const {
    const std::size_t slash = path.rfind('/');
    const int folder = slash == std::string::npos ? kRoot : find(path.substr(0, slash));
    if (folder == kNothing) throw std::logic_error("a recording misses the folder of " + path);
    return {folder, slash == std::string::npos ? path : path.substr(slash + 1)};
  }

  // ---- Events
  void open(std::size_t number, const IoEvent& event) {
    int inode = find(event.path);
    if (inode == kNothing) {
      inode = make_inode(false);
      const auto [folder, name] = place(event.path);
      name_operation(number, {{folder, name, inode}});
    } else if (event.truncates && !inodes_.at(inode).is_folder) {
      inodes_[inode].changes.push_back({number, 0, nullptr});
      touched_ = inode;
    }
    opened_[number] = inode;
  }

  void change(std::size_t number, const ByteChange& change) {
    touched_ = opened_.at(trace_.events[number].opened);
    inodes_[touched_].changes.push_back(change);
  }

  void name_operation(std::size_t number, std::vector<NameChange> changes) {
    for (const NameChange& change : changes) {
      auto& names = inodes_[change.folder].live_names;
      if (change.inode == kNothing) {
        names.erase(change.name);
      } else {
        names[change.name] = touched_ = change.inode;
      }
    }
    operations_.push_back({number, std::move(changes)});
  }

  void sync(int number) {
    Inode& inode = inodes_[number];
    if (!inode.is_folder) {
      inode.content = file_version_of(inode, true).content;
      inode.changes.clear();
    } else {
      Kept durable(operations_.size());
      for (std::size_t i = 0; i < durable.size(); ++i) durable[i] = operations_[i].touches(number);
      durable = with_predecessors(durable);
      std::vector<NameOperation> left;
      for (std::size_t i = 0; i < durable.size(); ++i) {
        if (!durable[i]) {
          left.push_back(std::move(operations_[i]));
          continue;
        }
        for (const NameChange& change : operations_[i].changes) {
          set_name(inodes_[change.folder].names, change);
        }
      }
      operations_ = std::move(left);
    }
    forget_unreachable();
  }

  static void set_name(std::map<std::string, int>& names, const NameChange& change) {
    if (change.inode == kNothing) {
      names.erase(change.name);
    } else {
      names[change.name] = change.inode;
    }
  }

  // Drops changes that can no longer affect any state.
  void forget_unreachable() {
    std::set<int> reachable;
    std::vector<int> next = {kRoot};
    for (const NameOperation& operation : operations_) {
      for (const NameChange& change : operation.changes) {
        if (change.inode != kNothing) next.push_back(change.inode);
      }
    }
    while (!next.empty()) {
      const int inode = next.back();
      next.pop_back();
      if (!reachable.insert(inode).second) continue;
      for (const auto& [name, child] : inodes_.at(inode).names) next.push_back(child);
    }
    std::erase_if(operations_, [&](const NameOperation& operation) {
      return std::none_of(
          operation.changes.begin(), operation.changes.end(),
          [&](const NameChange& change) { return reachable.contains(change.folder); });
    });
    for (auto& [number, inode] : inodes_) {
      if (!reachable.contains(number)) inode.changes.clear();
    }
  }

  // ---- What may be lost
  // A later operation on a name requires the earlier ones.
  Kept without_followers(Kept kept) const {
    for (std::size_t later = 0; later < kept.size(); ++later) {
      for (std::size_t earlier = 0; earlier < later && kept[later]; ++earlier) {
        if (!kept[earlier] && operations_[later].shares_name(operations_[earlier])) {
          kept[later] = false;
        }
      }
    }
    return kept;
  }
  Kept with_predecessors(Kept kept) const {
    for (std::size_t later = kept.size(); later-- > 0;) {
      for (std::size_t earlier = 0; earlier < later && kept[later]; ++earlier) {
        if (operations_[later].shares_name(operations_[earlier])) kept[earlier] = true;
      }
    }
    return kept;
  }

  FileVersion file_version_of(const Inode& inode, bool kept) const {
    return file_version(trace_, inode.content, inode.changes, Kept(inode.changes.size(), kept));
  }
  // Each file with unsynced bytes: with all of them, or with none.
  std::map<int, FileVersion> file_versions(bool kept) const {
    std::map<int, FileVersion> files;
    for (const auto& [number, inode] : inodes_) {
      if (!inode.changes.empty()) files[number] = file_version_of(inode, kept);
    }
    return files;
  }

  bool concerns_last_call(int file) const {
    std::vector<int> next = {touched_};
    while (!next.empty() && next.back() != kNothing) {
      const int inode = next.back();
      next.pop_back();
      if (inode == file) return true;
      for (const auto& [name, child] : inodes_.at(inode).live_names) next.push_back(child);
    }
    return false;
  }

  // ---- The remaining state
  FileTree tree(const Kept& kept, const std::map<int, FileVersion>& files) const {
    std::map<int, std::map<std::string, int>> changed;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      if (!kept[i]) continue;
      for (const NameChange& change : operations_[i].changes) {
        set_name(changed.try_emplace(change.folder, inodes_.at(change.folder).names).first->second,
                 change);
      }
    }
    FileTree result;
    collect(kRoot, "", changed, files, result);
    return result;
  }
  void collect(int folder, const std::string& prefix,
               const std::map<int, std::map<std::string, int>>& changed,
               const std::map<int, FileVersion>& files, FileTree& result) const {
    const auto found = changed.find(folder);
    for (const auto& [name, number] :
         found == changed.end() ? inodes_.at(folder).names : found->second) {
      const Inode& inode = inodes_.at(number);
      const std::string path = prefix + name;
      if (inode.is_folder) {
        result[path] = nullptr;
        collect(number, path + "/", changed, files, result);
      } else {
        const auto version = files.find(number);
        result[path] = version == files.end() ? inode.content : version->second.content;
      }
    }
  }

  std::string lost_text(const Kept& kept, const std::map<int, FileVersion>& files) const {
    std::string text;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      if (!kept[i]) text += describe(trace_, operations_[i].event) + "; ";
    }
    for (const auto& [inode, version] : files) text += version.lost;
    return text;
  }

  const IoTrace& trace_;
  std::map<int, Inode> inodes_;
  int next_inode_ = kRoot + 1;
  std::map<std::size_t, int> opened_;      // by the event that opened the file
  std::vector<NameOperation> operations_;  // not durable, in their order
  int touched_ = kNothing;                 // the inode that the last call wrote, made or renamed
};

std::string digest(const FileTree& tree, std::int64_t mark) {
  Xxh3Hasher hasher;
  const auto add = [&hasher](const std::string& text) {
    const std::size_t size = text.size();  // different texts never give the same bytes
    hasher.update(&size, sizeof size);
    hasher.update(text.data(), size);
  };
  for (const auto& [path, content] : tree) {
    add(path);
    add(content == nullptr ? "folder" : "file");
    if (content != nullptr) add(*content);
  }
  hasher.update(&mark, sizeof mark);
  return hasher.hex_digest();
}

bool same(const FileTree& a, const FileTree& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && (x.second == nullptr) == (y.second == nullptr) &&
           (x.second == nullptr || *x.second == *y.second);
  });
}

// Takes the first state of each cut in a random order, then the second ones, ...
std::vector<CrashState> sample(std::vector<CrashState> states, std::size_t limit,
                               std::mt19937_64& random) {
  if (states.size() <= limit) return states;
  std::shuffle(states.begin(), states.end(), random);
  std::map<std::size_t, std::size_t> num_of_cut;
  std::vector<std::pair<std::size_t, std::size_t>> order;  // number within the cut, position
  for (std::size_t i = 0; i < states.size(); ++i) {
    order.emplace_back(num_of_cut[states[i].cut]++, i);
  }
  std::sort(order.begin(), order.end());
  std::vector<CrashState> chosen;
  for (std::size_t i = 0; i < limit; ++i) chosen.push_back(std::move(states[order[i].second]));
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const CrashState& a, const CrashState& b) { return a.cut < b.cut; });
  return chosen;
}

}  // namespace

std::vector<std::size_t> evenly_spaced(std::size_t count, std::size_t end) {
  count = std::min(count, end);
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < count; ++i) numbers.push_back(i * end / count);
  return numbers;
}

std::vector<CrashState> crash_states(const IoTrace& trace, std::size_t limit, std::uint64_t seed,
                                     std::size_t first_cut) {
  Disk disk(trace);
  std::mt19937_64 random(seed);
  std::vector<CrashState> states;
  std::set<std::string> seen;
  std::int64_t mark = 0;
  for (std::size_t cut = 0; cut <= trace.events.size(); ++cut) {
    if (cut > 0) {
      disk.step(cut - 1);
      mark = std::max(mark, trace.events[cut - 1].mark);
    }
    if (cut < first_cut) continue;
    disk.for_each_state(random, [&](FileTree tree, const auto& lost) {
      if (seen.insert(digest(tree, mark)).second) {
        states.push_back({std::move(tree), cut, mark, lost()});
      }
    });
  }
  if (!same(disk.live_tree(), trace.after)) {
    throw std::logic_error("the recording misses calls: it does not lead to the files found");
  }
  return sample(std::move(states), limit, random);
}

std::vector<std::size_t> kill_points(const IoTrace& trace, std::size_t count) {
  std::vector<std::size_t> points;
  const auto add = [&](std::size_t cut) {
    if (points.size() < count && std::find(points.begin(), points.end(), cut) == points.end()) {
      points.push_back(cut);
    }
  };
  for (const Kind kind : {Kind::kMakeFolder, Kind::kRename}) {
    for (std::size_t i = 0; i < trace.events.size(); ++i) {
      if (trace.events[i].kind == kind) add(i + 1);
    }
  }
  for (const std::size_t cut : evenly_spaced(count, trace.events.size() + 1)) add(cut);
  return points;
}

IoTrace record_after_kill(const IoTrace& killed, std::size_t cut,
                          const std::filesystem::path& folder, const std::function<void()>& body) {
  Disk disk(killed);
  for (std::size_t i = 0; i < cut; ++i) disk.step(i);
  write_tree(disk.live_tree(), folder);
  const IoTrace second = record_io(folder, body);
  IoTrace both;
  both.before = killed.before;
  both.events.assign(killed.events.begin(),
                     killed.events.begin() + static_cast<std::ptrdiff_t>(cut));
  for (IoEvent event : second.events) {
    event.opened += cut;
    both.events.push_back(std::move(event));
  }
  both.after = second.after;
  return both;
}

std::size_t first_promise(const IoTrace& trace, std::size_t from) {
  while (trace.events.at(from).kind != Kind::kMark) ++from;
  return from + 1;
}

}  // namespace birkhoff
