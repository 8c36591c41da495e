#include "inspect/log_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "core/error.h"
#include "inspect/fork_mutex.h"

namespace te::inspect {

namespace {

// Locks or unlocks a file. The lock belongs to the open file (F_OFD_SETLK) if the system has that.
// A lock of the process (F_SETLK) would end as soon as the process opens and closes the file again.
bool set_lock(int file, short kind) {
#ifdef F_OFD_SETLK
  constexpr int kCommand = F_OFD_SETLK;
#else
  constexpr int kCommand = F_SETLK;
#endif
  struct flock whole_file {};
  whole_file.l_type = kind;
  whole_file.l_whence = SEEK_SET;
  return fcntl(file, kCommand, &whole_file) == 0;
}

// The files that this process has open. Forked children close theirs at once: a file stays locked
// until its last copy is closed, and children may outlive their parent.
ForkMutex g_mutex;
std::set<int*> g_open;

void close_all() {
  for (int* file : g_open) close(std::exchange(*file, -1));
  g_open.clear();
}

[[maybe_unused]] const int g_close_in_children = pthread_atfork(nullptr, nullptr, close_all);

void remember(int& file) {
  const std::lock_guard lock(g_mutex);
  g_open.insert(&file);
}

void forget(int& file) {
  const std::lock_guard lock(g_mutex);
  g_open.erase(&file);
}

}  // namespace

LogFile::LogFile(std::string path) : path_(std::move(path)) {
  open_file();
  lock();
  remember(file_);
}

LogFile::~LogFile() {
  flush();
  forget(file_);
  close(file_);
}

void LogFile::begin(bool append) {
  if (append)
    end_torn_line();
  else if (ftruncate(file_, 0) != 0)
    error_ = std::strerror(errno);
}

void LogFile::open_file() {
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  require(!error, Kind::Value, "initialize", "expected a log_dir that can be written, got ",
          to_utf8(folder.string()), ": ", error.message());
  file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  require(file_ >= 0, Kind::Value, "initialize", "expected a log_dir that can be written, got ",
          path(), ": ", std::strerror(errno));
}

// Throws if another process has locked the file: two writers would truncate each other's files and
// mix their lines. On file systems without locks, nothing is refused.
void LogFile::lock() {
  if (set_lock(file_, F_WRLCK) || (errno != EAGAIN && errno != EACCES)) return;
  close(file_);
  fail(Kind::Value, "initialize", "expected a log_dir that no other process logs to, got ", path(),
       ", which another one writes: give each process a log_dir or a rank of its own");
}

void LogFile::synchronize() {
  if (file_ >= 0) fdatasync(file_);  // fails for pipes and the like, where it is not needed
}

void LogFile::release() { set_lock(file_, F_UNLCK); }

bool LogFile::was_removed() { return std::exchange(removed_, false); }

// Creates a new file if the file was removed, because lines written to a removed file are lost.
void LogFile::replace_removed() {
  struct stat status;
  if (fstat(file_, &status) != 0 || status.st_nlink > 0) return;
  const int before = file_;
  try {
    open_file();
  } catch (const Error&) {  // the folder cannot be created again: go on with the old file
    file_ = before;
    return;
  }
  close(before);
  set_lock(file_, F_WRLCK);
  removed_ = true;
}

void LogFile::end_torn_line() {
  const off_t size = lseek(file_, 0, SEEK_END);
  char last = '\n';
  if (size > 0 && pread(file_, &last, 1, size - 1) == 1 && last != '\n') unwritten_.push_back('\n');
}

void LogFile::add(std::string_view line) {
  unwritten_ += line;
  if (unwritten_.size() <= kBound) return;
  flush();
  if (unwritten_.size() > kBound) drop_oldest();
}

void LogFile::drop_oldest() {
  const size_t begin =
      inside_line_ ? unwritten_.find('\n') + 1 : 0;  // keep the rest of a line partly written
  size_t end = begin;
  while (unwritten_.size() - (end - begin) > kBound / 2) {
    end = unwritten_.find('\n', end) + 1;
    ++dropped_;
  }
  unwritten_.erase(begin, end - begin);
}

bool LogFile::flush() {
  if (file_ < 0) {
    unwritten_.clear();
    return true;
  }
  if (unwritten_.empty()) return true;
  replace_removed();
  size_t written = 0;
  while (written < unwritten_.size()) {
    const ssize_t count = write(file_, unwritten_.data() + written, unwritten_.size() - written);
    if (count > 0) {
      written += static_cast<size_t>(count);
    } else if (count == 0 || errno != EINTR) {
      error_ = std::strerror(errno);
      break;
    }
  }
  if (written > 0) inside_line_ = unwritten_[written - 1] != '\n';
  unwritten_.erase(0, written);
  return unwritten_.empty();
}

}  // namespace te::inspect
