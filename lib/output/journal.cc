// SPDX-License-Identifier: Apache-2.0
#include "lib/output/journal.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>
#include <string_view>
#include <utility>

#include "lib/base/catch_exceptions.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/device/crc32.h"

namespace reshard {
namespace {

constexpr std::string_view kFirst = "reshard 1\n";
constexpr std::size_t kFrame = 8;             // length and CRC before a payload
constexpr std::size_t kItem = 40, kSum = 40;  // sizes in a payload: of an item (a run takes less), and of a checksum
constexpr std::size_t kSumsPerEntry = std::size_t{1} << 20;  // when a journal is written at once

template <class T>
void put(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void put_number(std::string& out, Index n) { put(out, static_cast<std::uint64_t>(n)); }

void put_digest(std::string& out, const Digest& digest) {
  for (const std::uint32_t word : digest.words) put(out, word);
}

void put_sums(std::string& out, const std::vector<CrcPiece>& sums) {
  put(out, static_cast<std::uint32_t>(sums.size()));
  for (const CrcPiece& sum : sums) {
    put(out, sum.extent.file);
    for (const Index n : {sum.extent.offset, sum.extent.length, sum.begin, sum.length}) put_number(out, n);
    put(out, sum.crc);
  }
}

std::uint32_t entry_crc(std::uint32_t length, Bytes payload) {
  return crc32(crc32(0, std::as_bytes(std::span(&length, 1))), payload);
}

// Appends an entry to `out`; write(out) appends its payload.
template <class Write>
void put_entry(std::string& out, Write write) {
  const std::size_t begin = out.size();
  out.append(kFrame, '\0');
  write(out);
  const Bytes payload = as_bytes(std::string_view(out).substr(begin + kFrame));
  const auto length = static_cast<std::uint32_t>(payload.size());
  const std::uint32_t frame[2] = {length, entry_crc(length, payload)};
  std::memcpy(out.data() + begin, frame, kFrame);
}

void put_first(std::string& out, SlabCut cut, const std::string& facts) {
  put_entry(out, [&](std::string& to) {
    to += kFirst;
    put_number(to, cut.usual);
    put_number(to, cut.limit);
    to += facts;
  });
}

void put_group(std::string& out, const FinishedSlabs& group) {
  out.reserve(out.size() + kFrame + kItem * (group.digests.size() + group.slabs.size() + 1) +
              kSum * (group.read.size() + group.written.size()));
  put_entry(out, [&](std::string& to) {
    put_number(to, group.bytes);
    put(to, static_cast<std::uint32_t>(group.slabs.size()));
    for (const auto& [first, count] : group.slabs) {
      put_number(to, first);
      put_number(to, count);
    }
    put(to, static_cast<std::uint32_t>(group.digests.size()));
    for (const auto& [item, digests] : group.digests) {
      put_number(to, item);
      put_digest(to, digests.source);
      put_digest(to, digests.target);
    }
    put_sums(to, group.read);
    put_sums(to, group.written);
  });
}

// Reads a number that must fit an Index.
Result<Index> number(Cursor& cursor) {
  const auto value = to_index(TRY(cursor.read<std::uint64_t>("number")));
  if (!value) return cursor.error("number", "expected at most 2^63 - 1");
  return *value;
}

// Reads a count of elements of `bytes` bytes each and checks that these follow.
Result<std::uint32_t> count(Cursor& cursor, Index bytes) {
  const auto n = TRY(cursor.read<std::uint32_t>("count"));
  if (n > cursor.left() / bytes)
    return cursor.error("count",
                        "expected at most " + std::to_string(cursor.left() / bytes) + ", got " + std::to_string(n));
  return n;
}

Result<Digest> digest(Cursor& cursor) {
  Digest out;
  for (std::uint32_t& word : out.words) word = TRY(cursor.read<std::uint32_t>("digest"));
  return out;
}

Result<std::vector<CrcPiece>> sums(Cursor& cursor) {
  const std::uint32_t n = TRY(count(cursor, 40));
  std::vector<CrcPiece> out;
  for (std::uint32_t i = 0; i < n; ++i) {
    CrcPiece sum;
    sum.extent.file = TRY(cursor.read<std::uint32_t>("file"));
    for (Index* const value : {&sum.extent.offset, &sum.extent.length, &sum.begin, &sum.length})
      *value = TRY(number(cursor));
    sum.crc = TRY(cursor.read<std::uint32_t>("CRC-32"));
    if (sum.length == 0 || !fits_inside(sum.begin, sum.length, sum.extent.length))
      return cursor.error("sum", "expected a range inside its extent");
    out.push_back(sum);
  }
  return out;
}

Result<FinishedSlabs> parse_group(Bytes payload, const std::string& path, Index offset) {
  Cursor cursor(payload, path, offset);
  FinishedSlabs out;
  out.bytes = TRY(number(cursor));
  Index end = 0;
  for (std::uint32_t n = TRY(count(cursor, 16)); n > 0; --n) {
    const Index first = TRY(number(cursor)), slabs = TRY(number(cursor));
    const auto next = checked_add(first, slabs);
    if (first < end || slabs == 0 || !next)
      return cursor.error("slabs", "expected ascending runs of at least one slab");
    out.add_run(first, slabs);
    end = *next;
  }
  for (std::uint32_t n = TRY(count(cursor, 40)); n > 0; --n) {
    const Index item = TRY(number(cursor));
    FinishedSlabs::Digests digests;
    digests.source = TRY(digest(cursor));
    digests.target = TRY(digest(cursor));
    if (!out.digests.emplace(item, digests).second) return cursor.error("item", "listed twice");
  }
  out.read = TRY(sums(cursor));
  out.written = TRY(sums(cursor));
  if (!cursor.done()) return cursor.error("entry", "expected no further bytes");
  return out;
}

}  // namespace

void FinishedSlabs::add_run(Index first, Index count) {
  auto run = slabs.emplace(first, count).first;
  const auto next = std::next(run);
  if (next != slabs.end() && first + count == next->first) {
    run->second += next->second;
    slabs.erase(next);
  }
  if (run == slabs.begin()) return;
  const auto before = std::prev(run);
  if (before->first + before->second != first) return;
  before->second += run->second;
  slabs.erase(run);
}

bool FinishedSlabs::add(const FinishedSlabs& more) {
  const auto sum = checked_add(bytes, more.bytes);
  if (!sum) return false;
  for (const auto& [first, count] : more.slabs) {
    const auto next = slabs.lower_bound(first);
    if (next != slabs.end() && next->first < first + count) return false;
    if (next != slabs.begin() && std::prev(next)->first + std::prev(next)->second > first) return false;
  }
  bytes = *sum;
  for (const auto& [first, count] : more.slabs) add_run(first, count);
  for (const auto& [item, both] : more.digests) {
    digests[item].source += both.source;
    digests[item].target += both.target;
  }
  read.insert(read.end(), more.read.begin(), more.read.end());
  written.insert(written.end(), more.written.begin(), more.written.end());
  return true;
}

Result<std::optional<JournalText>> read_journal(const File& file) {
  const Index size = TRY(file.size());
  std::optional<JournalText> out;
  std::vector<std::byte> payload;
  for (Index at = 0; size - at >= Index{kFrame};) {
    std::uint32_t frame[2];
    TRY(file.read_at(at, std::as_writable_bytes(std::span(frame))));
    at += Index{kFrame};
    if (frame[0] > size - at) break;
    payload.resize(frame[0]);
    TRY(file.read_at(at, payload));
    if (entry_crc(frame[0], payload) != frame[1]) break;
    if (!out) {
      Cursor cursor(payload, file.path(), at);
      const auto begins = cursor.take(std::ssize(kFirst), "journal");
      if (!begins || as_string(*begins) != kFirst) break;
      const auto usual = number(cursor), limit = number(cursor);
      if (!usual || !limit || *usual == 0 || *limit == 0) break;
      out.emplace();
      out->cut = {*usual, *limit};
      out->facts = as_string(*cursor.take(cursor.left(), "facts"));
    } else {
      const auto group = parse_group(payload, file.path(), at);
      if (!group || !out->finished.add(*group)) break;
    }
    at += frame[0];
  }
  return out;
}

Result<Index> write_journal(const File& file, const JournalText& text) {
  Index length = 0;
  const auto append = [&](const auto& put) -> Status {
    std::string entry;
    put(entry);
    TRY(file.write_at(length, as_bytes(entry)));
    length += std::ssize(entry);
    return {};
  };
  TRY(append([&](std::string& out) { put_first(out, text.cut, text.facts); }));
  // Checksums of many slabs come before the slabs, so that a torn journal never has slabs without them.
  const FinishedSlabs& all = text.finished;
  for (const bool is_read : {true, false}) {
    const std::vector<CrcPiece>& sums = is_read ? all.read : all.written;
    for (std::size_t i = 0; i < sums.size(); i += kSumsPerEntry) {
      FinishedSlabs part;
      (is_read ? part.read : part.written)
          .assign(sums.begin() + i, sums.begin() + std::min(sums.size(), i + kSumsPerEntry));
      TRY(append([&](std::string& out) { put_group(out, part); }));
    }
  }
  FinishedSlabs slabs;
  slabs.bytes = all.bytes;
  slabs.slabs = all.slabs;
  slabs.digests = all.digests;
  TRY(append([&](std::string& out) { put_group(out, slabs); }));
  TRY(file.sync_data());
  return length;
}

Result<std::vector<std::string>> changed_facts(const std::string& before, const std::string& now) {
  const Json old = TRY(parse_json(before, "journal")), current = TRY(parse_json(now, "journal"));
  std::vector<std::string> out;
  for (const Json::Member& fact : TRY(current.as_object())) {
    const Json* const was = old.find(fact.key);
    if (!was || to_text(*was) != to_text(fact.value)) out.push_back(fact.key);
  }
  for (const Json::Member& fact : TRY(old.as_object()))
    if (!current.contains(fact.key)) out.push_back(fact.key);
  return out;
}

Journal::Journal(std::function<Result<File>()> open, Index length, std::string facts, Index group_bytes,
                 std::function<Status()> sync_data)
    : open_(std::move(open)),
      sync_data_(std::move(sync_data)),
      facts_(std::move(facts)),
      group_bytes_(group_bytes),
      length_(length) {}

void Journal::begin(SlabCut cut, std::function<std::vector<CrcPiece>()> take_read) {
  cut_ = cut;
  take_read_ = std::move(take_read);
}

Status Journal::add(Index slab, Index item, Index bytes, const FinishedSlabs::Digests& digests,
                    const std::vector<CrcPiece>& written) {
  std::unique_lock lock(mutex_);
  closed_.wait(lock, [&] { return !closing_ || !is_due(); });
  if (stopped_) return {};
  // If one of these allocations fails, the group does not contain the slab yet.
  group_.written.insert(group_.written.end(), written.begin(), written.end());
  FinishedSlabs::Digests& sums = group_.digests[item];
  group_.add_run(slab, 1);
  sums.source += digests.source;
  sums.target += digests.target;
  group_.bytes += bytes;
  return closing_ || !is_due() ? Status() : close(lock);
}

bool Journal::is_due() const {
  return group_.bytes >= group_bytes_ || static_cast<Index>(group_.digests.size() + group_.written.size()) >= kEntries;
}

Status Journal::close_group() {
  std::unique_lock lock(mutex_);
  closed_.wait(lock, [&] { return !closing_; });
  return stopped_ || group_.slabs.empty() ? Status() : close(lock);
}

Status Journal::close(std::unique_lock<std::mutex>& lock) {
  closing_ = true;
  FinishedSlabs group = std::exchange(group_, {});
  const Index bytes = group.bytes;
  lock.unlock();
  // Other threads wait for this group, so it must end without an exception.
  Status status = catch_exceptions([&] { return write(std::move(group)); });
  lock.lock();
  closing_ = false;
  // A failed sync may have lost data of any slab, so no further group is recorded.
  if (!status) stopped_ = true;
  if (status) bytes_ += bytes;
  closed_.notify_all();
  return status;
}

void Journal::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
}

Index Journal::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

// Called by one thread at a time.
Status Journal::write(FinishedSlabs group) {
  // Every slab of the group was read before, so no checksum is missing.
  if (take_read_) group.read = take_read_();
  TRY(sync_data_());
  if (!file_) file_.emplace(TRY(open_()));
  std::string text;
  if (length_ == 0) put_first(text, cut_, facts_);
  put_group(text, group);
  TRY(file_->write_at(length_, as_bytes(text)));
  TRY(file_->sync_data());
  length_ += std::ssize(text);
  return {};
}

}  // namespace reshard
