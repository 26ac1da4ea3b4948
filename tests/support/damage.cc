#include "tests/support/damage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <numeric>
#include <set>
#include <tuple>

#include "formats/dcp/metadata.h"
#include "formats/encoding/safetensors_header.h"
#include "formats/open.h"
#include "lib/checkpoint/state_key.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/must.h"

namespace reshard {
namespace {

constexpr const char* kItemsHaveNoNames =
    "an item tells its dtype and shape, not its tensor or box: equal ones can be exchanged";
constexpr const char* kOtherStateIsFree = "nothing tells which other state a run keeps, nor what it is called";
constexpr const char* kNoChecksum = "the format records no checksum";
constexpr const char* kEntriesAreAlike = "entries of equal dtype and shape can be exchanged: only the values differ";

// Attempts per requested damage, because many fixtures have few suitable places for some kinds.
constexpr int kAttempts = 4;

const auto& pick(const auto& list, Rng& rng) {
  return list[static_cast<std::size_t>(below(rng, static_cast<Index>(list.size())))];
}

std::string flipped(std::string bytes, Index at, Rng& rng) {
  bytes[static_cast<std::size_t>(at)] ^= static_cast<char>(1 << below(rng, 8));
  return bytes;
}

// Returns the name with one letter changed.
std::string misspelt(std::string name, Rng& rng) {
  char& c = name[static_cast<std::size_t>(below(rng, static_cast<Index>(name.size())))];
  c = c == 'x' ? 'y' : 'x';
  return name;
}

// Returns the name with layers 0 and 1 exchanged, or the same name if it belongs to neither.
std::string in_other_layer(std::string name) {
  const auto at = name.find("layers.");
  if (at == std::string::npos || name[at + 8] != '.') return name;
  char& digit = name[at + 7];
  if (digit == '0')
    digit = '1';
  else if (digit == '1')
    digit = '0';
  return name;
}

DType other_dtype(DType dtype, bool same_width, Rng& rng) {
  std::vector<DType> fit;
  for (const DType d : {DType::kUint8, DType::kInt16, DType::kFloat16, DType::kBFloat16, DType::kInt32, DType::kFloat32,
                        DType::kInt64, DType::kFloat64})
    if (d != dtype && (byte_size(d) == byte_size(dtype)) == same_width) fit.push_back(d);
  return pick(fit, rng);
}

// ---- DCP

struct Entry {
  TargetTensor tensor;  // for a blob only name and path are used
  bool is_blob = false;
  std::vector<dcp::WrittenItem> items;
};

// The content of a .metadata in an editable form.
struct Metadata {
  std::vector<Entry> entries;
  std::vector<std::string> files;

  std::string text() const {
    std::vector<dcp::WrittenEntry> out;
    for (const Entry& e : entries)
      out.push_back({e.is_blob ? nullptr : &e.tensor, e.tensor.name, e.tensor.path, e.items});
    return dcp::write_metadata(out, files);
  }
  void rename(std::size_t entry, std::string name) {
    entries[entry].tensor.path = {};  // the writer derives it from the name
    entries[entry].tensor.name = std::move(name);
  }
};

Metadata metadata_of(const Catalog& catalog) {
  Metadata m;
  for (const CatalogFile& f : catalog.files) m.files.push_back(f.path);
  for (const Tensor& t : catalog.tensors()) {
    Entry e{{t.name, t.dtype, t.shape, t.path, {}}, false, {}};
    for (std::size_t i = 0; i < t.fragments.size(); ++i) {
      const Extent& x = t.fragments.extent(i);
      e.items.push_back({t.fragments.box(i), x.file, x.offset, x.length});
    }
    m.entries.push_back(std::move(e));
  }
  for (const Blob& b : catalog.blobs)
    m.entries.push_back(
        {{b.name, DType::kUint8, {}, b.path, {}}, true, {{{}, b.extent.file, b.extent.offset, b.extent.length}}});
  return m;
}

class DcpDamager {
 public:
  DcpDamager(const std::string& checkpoint, std::uint32_t seed) : rng_(seed), files_(all_files(checkpoint)) {
    const OpenCheckpoint open = must(open_checkpoint(checkpoint));
    Catalog& catalog = open.reader->catalog();
    healthy_ = metadata_of(catalog);
    for (std::size_t e = 0; e < healthy_.entries.size(); ++e)
      for (std::size_t i = 0; i < healthy_.entries[e].items.size(); ++i) {
        if (!healthy_.entries[e].is_blob) pieces_.push_back({e, i});
        const dcp::WrittenItem& item = healthy_.entries[e].items[i];
        items_.push_back({item.file, item.offset, item.length});
      }
    std::vector<std::size_t> all(catalog.tensors().size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    if (!open.reader->locate(all, 1, "/tmp")) std::abort();
    for (const Tensor& t : catalog.tensors())
      for (std::size_t i = 0; i < t.fragments.size(); ++i) payloads_.push_back(t.fragments.extent(i));
  }

  const Metadata& healthy() const { return healthy_; }

  std::vector<Damage> run() {
    drop();
    move_boxes();
    move_storage();
    describe_otherwise();
    rename();
    exchange_files();
    remove_ranks();
    flip();
    return std::move(out_);
  }

 private:
  struct Piece {
    std::size_t entry = 0, item = 0;
  };
  // Makes a change; returns false if it does not apply here.
  using Edit = std::function<bool(Metadata& m, Damage& d)>;

  void edit(const std::string& kind, int wanted, const Edit& change) {
    std::set<std::string> seen;
    for (int i = 0; i < wanted * kAttempts && static_cast<int>(seen.size()) < wanted; ++i) {
      Metadata m = healthy_;
      Damage d{kind, "", {}, ""};
      if (!change(m, d)) continue;
      std::string text = m.text();
      if (!seen.insert(text).second) continue;
      d.files[".metadata"] = std::move(text);
      out_.push_back(std::move(d));
    }
  }
  // Makes edits of one piece of a tensor.
  void edit_piece(const std::string& kind, int wanted, const std::function<bool(Entry& e, dcp::WrittenItem& item)>& f) {
    edit(kind, wanted, [&](Metadata& m, Damage& d) {
      const Piece p = pick(pieces_, rng_);
      Entry& e = m.entries[p.entry];
      d.what = said(p);
      return f(e, e.items[p.item]);
    });
  }
  void edit_tensor(const std::string& kind, int wanted, const std::function<bool(Entry& e)>& f) {
    edit_piece(kind, wanted, [&](Entry& e, dcp::WrittenItem&) { return f(e); });
  }

  std::string said(Piece p) const {
    const Entry& e = healthy_.entries[p.entry];
    return "'" + e.tensor.name + "' " + to_string(e.items[p.item].box);
  }
  const dcp::WrittenItem& item(Piece p) const { return healthy_.entries[p.entry].items[p.item]; }
  // Returns whether the stored items of two pieces have the same header.
  bool are_alike(Piece a, Piece b) const {
    return item(a).box.shape == item(b).box.shape &&
           healthy_.entries[a.entry].tensor.dtype == healthy_.entries[b.entry].tensor.dtype;
  }
  static void take_storage(dcp::WrittenItem& to, const dcp::WrittenItem& from) {
    to.file = from.file;
    to.offset = from.offset;
    to.length = from.length;
  }
  // Returns whether a name belongs to the run or the optimizer as a whole, not to a parameter.
  bool is_other_state(const std::string& name) const {
    const std::string parameter = split_state_key(name).parameter;
    return std::none_of(healthy_.entries.begin(), healthy_.entries.end(),
                        [&](const Entry& e) { return !e.is_blob && e.tensor.name == parameter; });
  }

  void drop() {
    edit("drop a box", 12, [&](Metadata& m, Damage& d) {
      const Piece p = pick(pieces_, rng_);
      auto& items = m.entries[p.entry].items;
      d.what = said(p);
      items.erase(items.begin() + static_cast<std::ptrdiff_t>(p.item));
      return true;
    });
    edit("drop a tensor or object", 14, [&](Metadata& m, Damage& d) {
      const Index e = below(rng_, static_cast<Index>(m.entries.size()));
      d.what = m.entries[static_cast<std::size_t>(e)].tensor.name;
      m.entries.erase(m.entries.begin() + e);
      return true;
    });
  }

  void move_boxes() {
    edit_piece("shift a box", 12, [&](Entry&, dcp::WrittenItem& item) {
      if (item.box.rank() == 0) return false;
      Index& begin = item.box.origin[static_cast<int>(below(rng_, item.box.rank()))];
      begin = below(rng_, 2) == 0 && begin > 0 ? begin - 1 : begin + 1 + below(rng_, 8);
      return true;
    });
    edit_piece("shrink a box", 8, [&](Entry&, dcp::WrittenItem& item) {
      if (item.box.rank() == 0) return false;
      Index& extent = item.box.shape[static_cast<int>(below(rng_, item.box.rank()))];
      extent -= 1 + below(rng_, extent);
      return true;
    });
    edit_piece("grow a box", 8, [&](Entry&, dcp::WrittenItem& item) {
      if (item.box.rank() == 0) return false;
      item.box.shape[static_cast<int>(below(rng_, item.box.rank()))] += 1 + below(rng_, 8);
      return true;
    });
    edit_piece("transpose a box", 8, [&](Entry&, dcp::WrittenItem& item) {
      if (item.box.rank() != 2) return false;
      std::swap(item.box.origin[0], item.box.origin[1]);
      std::swap(item.box.shape[0], item.box.shape[1]);
      return true;
    });
    edit("duplicate a box, same place", 8, [&](Metadata& m, Damage& d) {
      const Piece p = pick(pieces_, rng_);
      Entry& e = m.entries[p.entry];
      d.what = said(p);
      e.items.push_back(e.items[p.item]);
      return true;
    });
    edit("duplicate a box, other place", 8, [&](Metadata& m, Damage& d) {
      const Piece p = pick(pieces_, rng_);
      Entry& e = m.entries[p.entry];
      dcp::WrittenItem copy = e.items[p.item];
      if (copy.box.rank() == 0) return false;
      copy.box.origin[0] = below(rng_, e.tensor.shape[0]);
      d.what = said(p);
      e.items.push_back(copy);
      return copy.box != e.items[p.item].box;
    });
  }

  void move_storage() {
    const auto swap = [&](bool alike) {
      return [&, alike](Metadata& m, Damage& d) {
        const Piece a = pick(pieces_, rng_), b = pick(pieces_, rng_);
        if (are_alike(a, b) != alike || item(a).offset == item(b).offset) return false;
        d.what = said(a) + " with " + said(b);
        if (alike) d.undetectable = kItemsHaveNoNames;
        take_storage(m.entries[a.entry].items[a.item], item(b));
        take_storage(m.entries[b.entry].items[b.item], item(a));
        return true;
      };
    };
    for (int i = 0; i < 4; ++i) edit("swap the storage of two equal boxes", 3, swap(true));
    edit("swap the storage of two unequal boxes", 10, swap(false));
    edit("point two boxes at the same bytes", 10, [&](Metadata& m, Damage& d) {
      const Piece a = pick(pieces_, rng_), b = pick(pieces_, rng_);
      d.what = said(a) + " at the bytes of " + said(b);
      take_storage(m.entries[a.entry].items[a.item], item(b));
      return a.entry != b.entry || a.item != b.item;
    });
    edit_piece("move a box's bytes", 8, [&](Entry&, dcp::WrittenItem& item) {
      Index& place = below(rng_, 2) == 0 ? item.offset : item.length;
      place += below(rng_, 2) == 0 && place > 64 ? -(1 + below(rng_, 64)) : 1 + below(rng_, 64);
      return true;
    });
  }

  void describe_otherwise() {
    edit_tensor("change a global shape", 12, [&](Entry& e) {
      if (e.tensor.shape.rank() == 0) return false;
      Index& extent = e.tensor.shape[static_cast<int>(below(rng_, e.tensor.shape.rank()))];
      const Index before = extent;
      const Index choices[] = {extent - 1, extent + 1, extent * 2, extent / 2, extent + 64};
      extent = choices[below(rng_, std::size(choices))];
      return extent != before;
    });
    edit_tensor("transpose a tensor", 8, [&](Entry& e) {
      if (e.tensor.shape.rank() != 2) return false;
      std::swap(e.tensor.shape[0], e.tensor.shape[1]);
      for (dcp::WrittenItem& item : e.items) {
        std::swap(item.box.origin[0], item.box.origin[1]);
        std::swap(item.box.shape[0], item.box.shape[1]);
      }
      return true;
    });
    for (const bool same_width : {true, false})
      edit_tensor("change a dtype", 6, [&](Entry& e) {
        e.tensor.dtype = other_dtype(e.tensor.dtype, same_width, rng_);
        return true;
      });
  }

  void rename() {
    const auto some_entry = [&] {
      return static_cast<std::size_t>(below(rng_, static_cast<Index>(healthy_.entries.size())));
    };
    edit("misspell a name", 10, [&](Metadata& m, Damage& d) {
      const std::size_t e = some_entry();
      const std::string from = m.entries[e].tensor.name;
      m.rename(e, misspelt(from, rng_));
      d.what = from + " is " + m.entries[e].tensor.name;
      if (is_other_state(from)) d.undetectable = kOtherStateIsFree;
      return true;
    });
    edit("take another layer's name", 6, [&](Metadata& m, Damage& d) {
      const std::size_t e = some_entry();
      d.what = m.entries[e].tensor.name;
      m.rename(e, in_other_layer(d.what));
      return m.entries[e].tensor.name != d.what;
    });
    // Exchanges the names and paths of layers 0 and 1.
    const auto exchange_names = [](Metadata& m, std::size_t e) {
      const std::string other = in_other_layer(m.entries[e].tensor.name);
      if (other == m.entries[e].tensor.name) return false;
      for (Entry& x : m.entries)
        if (x.tensor.name == other) {
          std::swap(x.tensor.name, m.entries[e].tensor.name);
          std::swap(x.tensor.path, m.entries[e].tensor.path);
          return true;
        }
      return false;
    };
    edit("exchange a name between two layers", 6, [&](Metadata& m, Damage& d) {
      const std::size_t e = some_entry();
      d.what = m.entries[e].tensor.name;
      d.undetectable = kItemsHaveNoNames;  // the layers of a Llama have equal shapes
      return exchange_names(m, e);
    });
    edit("exchange all names of two layers", 1, [&](Metadata& m, Damage& d) {
      for (std::size_t e = 0; e < m.entries.size(); ++e)
        if (healthy_.entries[e].tensor.name.find("layers.0.") != std::string::npos) exchange_names(m, e);
      d.what = "0 and 1";
      d.undetectable = kItemsHaveNoNames;
      return true;
    });
  }

  // What an audit knows about an item of a file: what is expected at which offset.
  using Slot = std::tuple<Index, Index, DType, Dims>;
  std::set<Slot> slots(std::uint32_t file) const {
    std::set<Slot> out;
    for (const Entry& e : healthy_.entries)
      for (const dcp::WrittenItem& i : e.items)
        if (i.file == file) out.insert({i.offset, i.length, e.tensor.dtype, i.box.shape});
    return out;
  }

  void exchange_files() {
    const auto n = static_cast<std::uint32_t>(healthy_.files.size());
    int equal = 0, unequal = 0;
    for (std::uint32_t a = 0; a < n; ++a)
      for (std::uint32_t b = a + 1; b < n; ++b) {
        const std::string &name_a = healthy_.files[a], &name_b = healthy_.files[b];
        const bool alike = slots(a) == slots(b);
        int& count = alike ? equal : unequal;
        if (++count > 6) continue;
        out_.push_back({alike ? "swap two files of equal items" : "swap two files of unequal items",
                        name_a + " and " + name_b,
                        {{name_a, files_.at(name_b)}, {name_b, files_.at(name_a)}},
                        alike ? kItemsHaveNoNames : ""});
      }
  }

  void remove_ranks() {
    const std::size_t n = healthy_.files.size();
    for (std::size_t f = 0; f < n; f += std::max<std::size_t>(1, n / 4)) {
      const std::string& name = healthy_.files[f];
      out_.push_back({"remove a rank's file", name, {{name, std::nullopt}}, ""});
      for (const bool file_too : {false, true}) {
        Metadata m = healthy_;
        for (Entry& e : m.entries) std::erase_if(e.items, [&](const dcp::WrittenItem& i) { return i.file == f; });
        Damage d{"drop a rank's boxes", name, {{".metadata", m.text()}}, ""};
        if (file_too) d.files[name] = std::nullopt;
        out_.push_back(std::move(d));
      }
    }
    for (int i = 0; i < 6; ++i) {
      const std::string& name = pick(healthy_.files, rng_);
      const std::string& bytes = files_.at(name);
      const auto size = static_cast<Index>(bytes.size());
      const Index keep = i == 0 ? size - 1 : below(rng_, size);
      out_.push_back({"truncate a file",
                      name + " to " + std::to_string(keep),
                      {{name, bytes.substr(0, static_cast<std::size_t>(keep))}},
                      ""});
    }
  }

  void flip_in(const std::string& kind, const std::string& name, Index begin, Index length) {
    const Index at = begin + below(rng_, length);
    out_.push_back({kind, name + "@" + std::to_string(at), {{name, flipped(files_.at(name), at, rng_)}}, ""});
  }

  void flip() {
    for (int i = 0; i < 20; ++i) {
      const Extent& payload = pick(payloads_, rng_);
      if (payload.length == 0) continue;
      flip_in("flip a bit of data", healthy_.files[payload.file], payload.offset, payload.length);
    }
    for (int i = 0; i < 50; ++i) {
      const Extent& item = pick(items_, rng_);
      const std::string& name = healthy_.files[item.file];
      const auto payload = std::find_if(payloads_.begin(), payloads_.end(), [&](const Extent& p) {
        return p.file == item.file && p.offset >= item.offset && p.offset + p.length <= item.offset + item.length;
      });
      if (payload == payloads_.end()) {
        flip_in("flip a bit of an object", name, item.offset, item.length);
      } else if (i % 2 == 0) {
        flip_in("flip a bit before an item's data", name, item.offset, payload->offset - item.offset);
      } else {
        const Index end = payload->offset + payload->length;
        flip_in("flip a bit behind an item's data", name, end, item.offset + item.length - end);
      }
    }
    for (int i = 0; i < 40; ++i)
      flip_in("flip a bit of .metadata", ".metadata", 0, static_cast<Index>(files_.at(".metadata").size()));
    for (int i = 0; i < 3; ++i) {
      const std::string& bytes = files_.at(".metadata");
      const auto keep = static_cast<std::size_t>(below(rng_, static_cast<Index>(bytes.size())));
      out_.push_back(
          {"truncate .metadata", std::to_string(keep) + " bytes", {{".metadata", bytes.substr(0, keep)}}, ""});
    }
  }

  Rng rng_;
  std::map<std::string, std::string> files_;
  Metadata healthy_;
  std::vector<Piece> pieces_;
  std::vector<Extent> items_, payloads_;
  std::vector<Damage> out_;
};

// ---- safetensors

class SafetensorsDamager {
 public:
  SafetensorsDamager(const std::string& path, std::uint32_t seed)
      : rng_(seed), name_(std::filesystem::path(path).filename()), bytes_(read_file(path)) {
    const auto header = must(read_safetensors_header(must(File::open(path))));
    healthy_ = header.entries;
    data_start_ = header.data_start;
    data_ = bytes_.substr(static_cast<std::size_t>(data_start_));
    for (SafetensorsEntry& e : healthy_) e.offset -= data_start_;
  }

  std::vector<Damage> run() {
    drop();
    describe_otherwise();
    rename();
    move_storage();
    flip();
    return std::move(out_);
  }

 private:
  using Entries = std::vector<SafetensorsEntry>;
  using Edit = std::function<bool(Entries& entries, std::size_t i, Damage& d)>;

  static std::string header_text(const Entries& entries) {
    std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
    for (const SafetensorsEntry& e : entries)
      json += ",\"" + e.name + "\":{\"dtype\":\"" + std::string(info(e.dtype).safetensors_name) +
              "\",\"shape\":" + to_string(e.shape) + ",\"data_offsets\":[" + std::to_string(e.offset) + "," +
              std::to_string(e.offset + e.length) + "]}";
    json += "}";
    json.resize((json.size() + 7) / 8 * 8, ' ');
    std::string out;
    for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(json.size() >> shift);
    return out + json;
  }

  void edit(const std::string& kind, int wanted, const Edit& change) {
    std::set<std::string> seen;
    for (int n = 0; n < wanted * kAttempts && static_cast<int>(seen.size()) < wanted; ++n) {
      Entries entries = healthy_;
      const auto i = static_cast<std::size_t>(below(rng_, static_cast<Index>(entries.size())));
      Damage d{kind, entries[i].name, {}, ""};
      if (!change(entries, i, d)) continue;
      std::string text = header_text(entries);
      if (!seen.insert(text).second) continue;
      d.files[name_] = text + data_;
      out_.push_back(std::move(d));
    }
  }

  void drop() {
    edit("drop an entry", 12, [&](Entries& entries, std::size_t i, Damage&) {
      entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    });
    for (int n = 0; n < 12; ++n) {
      Entries entries = healthy_;
      const auto i = static_cast<std::size_t>(below(rng_, static_cast<Index>(entries.size())));
      const SafetensorsEntry gone = entries[i];
      entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(i));
      for (SafetensorsEntry& e : entries)
        if (e.offset > gone.offset) e.offset -= gone.length;
      std::string data = data_;
      data.erase(static_cast<std::size_t>(gone.offset), static_cast<std::size_t>(gone.length));
      out_.push_back({"drop an entry and its data", gone.name, {{name_, header_text(entries) + data}}, ""});
    }
  }

  void describe_otherwise() {
    for (const bool same_width : {true, false})
      edit("change a dtype", 10, [&](Entries& entries, std::size_t i, Damage&) {
        entries[i].dtype = other_dtype(entries[i].dtype, same_width, rng_);
        return true;
      });
    edit("change a shape", 12, [&](Entries& entries, std::size_t i, Damage&) {
      Index& extent = entries[i].shape[static_cast<int>(below(rng_, entries[i].shape.rank()))];
      extent += below(rng_, 2) == 0 ? -1 : 1 + below(rng_, 64);
      return true;
    });
    edit("change a shape, as many elements", 12, [&](Entries& entries, std::size_t i, Damage&) {
      Dims& shape = entries[i].shape;
      if (shape.rank() != 2 || shape[1] % 2 != 0) return false;
      shape[0] *= 2;
      shape[1] /= 2;
      return true;
    });
    edit("transpose a tensor", 12, [&](Entries& entries, std::size_t i, Damage&) {
      Dims& shape = entries[i].shape;
      if (shape.rank() != 2 || shape[0] == shape[1]) return false;
      std::swap(shape[0], shape[1]);
      return true;
    });
  }

  void rename() {
    edit("misspell a name", 14, [&](Entries& entries, std::size_t i, Damage&) {
      entries[i].name = misspelt(entries[i].name, rng_);
      return true;
    });
    edit("take another layer's name", 10, [&](Entries& entries, std::size_t i, Damage& d) {
      entries[i].name = in_other_layer(d.what);
      return entries[i].name != d.what;
    });
  }

  bool are_alike(std::size_t a, std::size_t b) const {
    return healthy_[a].dtype == healthy_[b].dtype && healthy_[a].shape == healthy_[b].shape;
  }
  Edit exchange_places(bool alike) {
    return [this, alike](Entries& entries, std::size_t i, Damage& d) {
      const auto k = static_cast<std::size_t>(below(rng_, static_cast<Index>(entries.size())));
      if (i == k || are_alike(i, k) != alike || (!alike && healthy_[i].length == healthy_[k].length)) return false;
      std::swap(entries[i].offset, entries[k].offset);
      d.what += " with " + entries[k].name;
      if (alike) d.undetectable = kEntriesAreAlike;
      return true;
    };
  }

  void move_storage() {
    for (int n = 0; n < 4; ++n) edit("exchange the bytes of two equal tensors", 4, exchange_places(true));
    edit("exchange the bytes of two unequal tensors", 12, exchange_places(false));
    edit("exchange two names", 14, [&](Entries& entries, std::size_t i, Damage& d) {
      const auto k = static_cast<std::size_t>(below(rng_, static_cast<Index>(entries.size())));
      std::swap(entries[i].name, entries[k].name);
      d.what += " with " + entries[i].name;
      if (are_alike(i, k)) d.undetectable = kEntriesAreAlike;
      return i != k;
    });
    edit("point two names at the same bytes", 10, [&](Entries& entries, std::size_t i, Damage&) {
      const auto k = static_cast<std::size_t>(below(rng_, static_cast<Index>(entries.size())));
      entries[i].offset = entries[k].offset;
      entries[i].length = entries[k].length;
      return i != k;
    });
    edit("shift offsets", 12, [&](Entries& entries, std::size_t i, Damage&) {
      entries[i].offset += 1 + below(rng_, 64);
      return true;
    });
  }

  void flip_in(const std::string& kind, Index begin, Index length, const char* undetectable) {
    const Index at = begin + below(rng_, length);
    out_.push_back({kind, "@" + std::to_string(at), {{name_, flipped(bytes_, at, rng_)}}, undetectable});
  }

  void flip() {
    const auto size = static_cast<Index>(bytes_.size());
    for (int n = 0; n < 8; ++n) flip_in("flip a bit of the header's length", 0, 8, "");
    for (int n = 0; n < 40; ++n) flip_in("flip a bit of the header", 8, data_start_ - 8, "");
    for (int n = 0; n < 20; ++n) flip_in("flip a bit of data", data_start_, size - data_start_, kNoChecksum);
    for (int n = 0; n < 10; ++n) {
      const Index keep = n == 0 ? size - 1 : below(rng_, size);
      out_.push_back({"truncate the file",
                      "to " + std::to_string(keep),
                      {{name_, bytes_.substr(0, static_cast<std::size_t>(keep))}},
                      ""});
    }
    for (int n = 0; n < 4; ++n)
      out_.push_back({"append bytes", "", {{name_, bytes_ + std::string(static_cast<std::size_t>(n) + 1, 'x')}}, ""});
  }

  Rng rng_;
  std::string name_, bytes_, data_;
  Index data_start_ = 0;
  Entries healthy_;  // with offsets relative to the start of the data
  std::vector<Damage> out_;
};

}  // namespace

std::vector<Damage> damage_dcp(const std::string& checkpoint, std::uint32_t seed) {
  return DcpDamager(checkpoint, seed).run();
}

std::string rewritten_metadata(const std::string& checkpoint) { return DcpDamager(checkpoint, 0).healthy().text(); }

std::vector<Damage> damage_safetensors(const std::string& path, std::uint32_t seed) {
  return SafetensorsDamager(path, seed).run();
}

}  // namespace reshard
