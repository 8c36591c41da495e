#include "inspect/log_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/error.h"

namespace te::inspect {

namespace {

bool set_lock(int file, short kind) {
  struct flock whole_file {};
  whole_file.l_type = kind;
  whole_file.l_whence = SEEK_SET;
  return fcntl(file, F_SETLK, &whole_file) == 0;
}

}  // namespace

LogFile::LogFile(std::string path, bool append) : path_(std::move(path)), process_(getpid()) {
  open_file();
  lock();
  if (append)
    end_torn_line();
  else if (ftruncate(file_, 0) != 0)
    error_ = std::strerror(errno);
}

LogFile::~LogFile() {
  flush();
  close(file_);
}

void LogFile::open_file() {
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  require(!error, Kind::Value, "initialize", "expected a log_dir that can be written, got ", folder,
          ": ", error.message());
  file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  require(file_ >= 0, Kind::Value, "initialize", "expected a log_dir that can be written, got ",
          path_, ": ", std::strerror(errno));
}

// Two writers would truncate each other's files and tear each other's lines. The lock is one of the
// process: forked children do not keep it when their parent dies. Where there are no locks, nothing
// is refused.
void LogFile::lock() {
  if (set_lock(file_, F_WRLCK) || (errno != EAGAIN && errno != EACCES)) return;
  close(file_);
  fail(Kind::Value, "initialize", "expected a log_dir that no other process logs to, got ", path_,
       ", which another one writes: give each process a log_dir or a rank of its own");
}

void LogFile::synchronize() {
  if (getpid() == process_) fdatasync(file_);  // pipes and the like cannot, and need not
}

void LogFile::release() { set_lock(file_, F_UNLCK); }

bool LogFile::was_removed() { return std::exchange(removed_, false); }

// Lines that go into a file without a name are lost when it is closed.
void LogFile::replace_removed() {
  struct stat status;
  if (fstat(file_, &status) != 0 || status.st_nlink > 0) return;
  const int before = file_;
  try {
    open_file();
  } catch (const Error&) {  // its folder cannot be made again: go on with what there is
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
      inside_line_ ? unwritten_.find('\n') + 1 : 0;  // a line that has begun must be ended
  size_t end = begin;
  while (unwritten_.size() - (end - begin) > kBound / 2) {
    end = unwritten_.find('\n', end) + 1;
    ++dropped_;
  }
  unwritten_.erase(begin, end - begin);
}

bool LogFile::flush() {
  if (getpid() != process_) {
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
    } else if (errno != EINTR) {
      error_ = std::strerror(errno);
      break;
    }
  }
  if (written > 0) inside_line_ = unwritten_[written - 1] != '\n';
  unwritten_.erase(0, written);
  return unwritten_.empty();
}

}  // namespace te::inspect
