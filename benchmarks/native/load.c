// Plays a script of frames over many connections and takes the time of every reply.
//
//     load SOCKET SCRIPT
//
//     script      u32 magic | u32 connections | per connection:
//                 f64 rate | u32 setup | u32 cycle | setup + cycle entries
//     entry       u32 kind | u32 patches | u32 bytes | patches x u32 offset | the whole frame
//
// At start each connection sends its setup entries one by one; then "ready" is printed.  A line "run SECONDS FILE" on
// standard input starts a round: every connection sends its cycle's entries, over and over, one in flight at a time.
// Rate 0 sends the next as soon as the reply is there (closed loop).  Any other is the frames per second of that
// connection on a fixed timetable: what could not be sent in time waits here, and its latency counts from when it was
// due (open loop).  A round ends when what is in flight then has been answered; the next goes on from there.
//
// The four bytes at each patch's offset are overwritten with a number never used before, so that a prompt is new from
// that token on.  Replies are found by their length prefix alone; pushes (numbers from 128 on) are counted
// and skipped.  FILE gets 16 bytes a reply: u64 when it was there (ns, CLOCK_MONOTONIC), u32 latency (ns), u16
// connection, u8 kind, u8 number of the reply.  The round's line on standard output:
//
//     done REPLIES SECONDS ERRORS LATERS PUSHES BEGAN_NS | kind:replies:bytes of replies ...
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "frames.h"

enum { MAGIC = 0x474c564b, CHUNK = 1 << 18, ERROR = 77, LATER = 69, NEVER = 70, FAR_NS = 1000000000 };

typedef struct {
    uint32_t kind, patches, bytes;
    const uint8_t *offsets;  // patches x u32, as they lie in the script: not aligned
    uint8_t *frame;
} entry;

typedef struct {
    int fd;
    double gap_ns;  // between frames due; 0: closed loop
    entry *entries;
    uint32_t setup, cycle, at;
    int busy;       // an entry is on its way, or its reply is
    int blocked;    // the socket took only part of it
    uint32_t sent, kind;
    uint64_t began;
    double due;
    cutter in;
} client;

typedef struct {
    uint64_t at_ns;
    uint32_t latency_ns;
    uint16_t client;
    uint8_t kind, number;
} sample;

static client *clients;
static uint32_t client_count;
static int poll_fd;
static uint8_t chunk[CHUNK];
static uint32_t fresh;

static sample *samples;
static size_t sample_room, sample_count;
static uint64_t errors, laters, pushes, kind_replies[KINDS], kind_bytes[KINDS];

static void wish_for(client *c, uint32_t what) {
    struct epoll_event wish = {.events = what, .data.u32 = (uint32_t)(c - clients)};
    if (epoll_ctl(poll_fd, EPOLL_CTL_MOD, c->fd, &wish)) die("epoll_ctl");
}

static void push_out(client *c) {
    entry *e = &c->entries[c->at];
    while (c->sent < e->bytes) {
        ssize_t done = write(c->fd, e->frame + c->sent, e->bytes - c->sent);
        if (done < 0 && errno == EAGAIN) {
            if (!c->blocked) wish_for(c, EPOLLIN | EPOLLOUT);
            c->blocked = 1;
            return;
        }
        if (done <= 0) die("write");
        c->sent += (uint32_t)done;
    }
    if (c->blocked) wish_for(c, EPOLLIN);
    c->blocked = 0;
}

static void begin(client *c, uint64_t began) {
    entry *e = &c->entries[c->at];
    for (uint32_t i = 0; i < e->patches; i++) {
        uint32_t offset;
        memcpy(&offset, e->offsets + 4 * i, 4);
        fresh++;
        memcpy(e->frame + offset, &fresh, 4);
    }
    c->sent = 0;
    c->busy = 1;
    c->kind = e->kind;
    c->began = began;
    push_out(c);
}

static void note(client *c, uint64_t t) {
    const uint8_t *head = c->in.head;
    uint8_t number = head[number_at(head)];
    if (number == ERROR || number == LATER || number == NEVER) {
        if (number == ERROR && !errors) {
            fprintf(stderr, "client %u, entry %u (kind %u): refused:", (uint32_t)(c - clients), c->at, c->kind);
            for (int i = 4; i < HEAD_BYTES; i++) fprintf(stderr, " %02x", head[i]);
            fprintf(stderr, "\n");
        }
        *(number == ERROR ? &errors : &laters) += 1;
    }
    if (sample_count == sample_room) {
        sample_room = sample_room ? 2 * sample_room : 1 << 20;
        samples = realloc(samples, sample_room * sizeof *samples);
        if (!samples) die("realloc");
        memset(samples + sample_count, 1, (sample_room - sample_count) * sizeof *samples);  // touched before it counts
    }
    uint64_t took = t - c->began;
    samples[sample_count++] = (sample){t, took > UINT32_MAX ? UINT32_MAX : (uint32_t)took,
                                       (uint16_t)(c - clients), (uint8_t)c->kind, number};
    kind_replies[c->kind % KINDS]++;
    kind_bytes[c->kind % KINDS] += c->in.size;
}

// Reads what there is; true when the reply to the entry on its way was in it.
static int pull_in(client *c) {
    ssize_t got = read(c->fd, chunk, sizeof chunk);
    if (got < 0 && errno == EAGAIN) return 0;
    if (got <= 0) {
        fprintf(stderr, "client %u, entry %u (kind %u): the connection ended\n", (uint32_t)(c - clients), c->at, c->kind);
        exit(4);
    }
    uint64_t t = now_ns();
    int replied = 0;
    for (size_t at = 0; at < (size_t)got;) {
        int whole;
        at += cut(&c->in, chunk + at, (size_t)got - at, &whole);
        if (!whole) continue;
        if (c->in.head[number_at(c->in.head)] == 0xcc) {  // the number does not fit seven bits: a push
            pushes++;
            continue;
        }
        if (!c->busy || c->sent < c->entries[c->at].bytes) {
            fprintf(stderr, "client %u: a reply that nobody waits for\n", (uint32_t)(c - clients));
            exit(5);
        }
        note(c, t);
        c->busy = 0;
        replied = 1;
        if (++c->at == c->setup + c->cycle) c->at = c->setup;
    }
    return replied;
}

static void set_up(client *c) {
    struct epoll_event event;
    while (c->at < c->setup) {
        begin(c, now_ns());
        while (c->busy) {
            if (epoll_wait(poll_fd, &event, 1, -1) < 0) die("epoll_wait");
            client *from = &clients[event.data.u32];
            if (event.events & EPOLLOUT) push_out(from);
            if (event.events & EPOLLIN) pull_in(from);
            if (event.events & (EPOLLHUP | EPOLLERR) && !(event.events & EPOLLIN)) pull_in(from);
        }
        if (c->at == c->setup) break;
    }
}

static void round_of(double seconds) {
    struct epoll_event events[64];
    uint64_t start = now_ns(), stop = start + (uint64_t)(seconds * 1e9);
    uint32_t busy = 0;
    for (uint32_t i = 0; i < client_count; i++) {
        client *c = &clients[i];
        c->due = (double)start + c->gap_ns * i / client_count;
        if (c->cycle && !c->gap_ns) {
            begin(c, now_ns());
            busy++;
        }
    }
    for (;;) {
        uint64_t t = now_ns(), next = t + FAR_NS;
        if (t < stop) {
            for (uint32_t i = 0; i < client_count; i++) {
                client *c = &clients[i];
                if (c->busy || !c->cycle || !c->gap_ns) continue;
                if (c->due <= (double)t) {
                    begin(c, (uint64_t)c->due);
                    c->due += c->gap_ns;
                    busy++;
                } else if (c->due < (double)next) {
                    next = (uint64_t)c->due;
                }
            }
            if (next > stop) next = stop;
        } else if (!busy) {
            break;
        }
        t = now_ns();
        uint64_t wait = next > t ? next - t : 0;
        struct timespec patience = {(time_t)(wait / 1000000000u), (long)(wait % 1000000000u)};
        int ready = epoll_pwait2(poll_fd, events, 64, &patience, NULL);
        if (ready < 0 && errno != EINTR) die("epoll_pwait2");
        for (int i = 0; i < ready; i++) {
            client *c = &clients[events[i].data.u32];
            if (events[i].events & EPOLLOUT) push_out(c);
            if (!(events[i].events & ~(uint32_t)EPOLLOUT) || !pull_in(c)) continue;
            busy--;
            if (!c->gap_ns && (t = now_ns()) < stop) {
                begin(c, t);
                busy++;
            }
        }
    }
}

static void *need(const void *at, const uint8_t *from, const uint8_t *end, size_t bytes) {
    if ((size_t)(end - (const uint8_t *)at) < bytes || (const uint8_t *)at < from) {
        fprintf(stderr, "the script ends too soon\n");
        exit(2);
    }
    return (void *)at;
}

static void read_script(const char *path) {
    int fd = open(path, O_RDONLY);
    struct stat about;
    if (fd < 0 || fstat(fd, &about)) die(path);
    // Private and writable: patches stay ours.
    uint8_t *from = mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    if (from == MAP_FAILED) die("mmap");
    close(fd);
    uint8_t *at = from, *end = from + about.st_size;
    uint32_t magic;
    memcpy(&magic, need(at, from, end, 8), 4);
    memcpy(&client_count, at + 4, 4);
    if (magic != MAGIC || !client_count || client_count > 4096) {
        fprintf(stderr, "not a script: %s\n", path);
        exit(2);
    }
    at += 8;
    clients = calloc(client_count, sizeof *clients);
    for (uint32_t i = 0; clients && i < client_count; i++) {
        client *c = &clients[i];
        double rate;
        memcpy(&rate, need(at, from, end, 16), 8);
        memcpy(&c->setup, at + 8, 4);
        memcpy(&c->cycle, at + 12, 4);
        at += 16;
        c->gap_ns = rate > 0 ? 1e9 / rate : 0;
        c->entries = calloc((size_t)c->setup + c->cycle + 1, sizeof *c->entries);
        if (!c->entries) die("calloc");
        for (uint32_t k = 0; k < c->setup + c->cycle; k++) {
            entry *e = &c->entries[k];
            memcpy(e, need(at, from, end, 12), 12);
            e->offsets = need(at + 12, from, end, 4 * (size_t)e->patches + e->bytes);
            e->frame = at + 12 + 4 * (size_t)e->patches;
            at = e->frame + e->bytes;
            int wrong = e->kind >= KINDS || e->bytes < 6;
            for (uint32_t p = 0; p < e->patches; p++) {
                uint32_t offset;
                memcpy(&offset, e->offsets + 4 * p, 4);
                wrong |= offset + 4 > e->bytes;
            }
            if (wrong) {
                fprintf(stderr, "client %u, entry %u: not an entry\n", i, k);
                exit(2);
            }
        }
    }
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: load SOCKET SCRIPT\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, 9);
    prctl(PR_SET_TIMERSLACK, 1);
    fresh = 1u << 30;  // no token of a script is as large
    read_script(words[2]);
    struct sockaddr_un address = address_of(words[1]);
    poll_fd = epoll_create1(0);
    for (uint32_t i = 0; i < client_count; i++) {
        client *c = &clients[i];
        c->fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        struct epoll_event wish = {.events = EPOLLIN, .data.u32 = i};
        if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, c->fd, &wish)) die("epoll_ctl");
        set_up(c);
    }
    printf("ready %llu %llu\n", (unsigned long long)errors, (unsigned long long)laters);
    fflush(stdout);

    char line[4096], path[4000];
    double seconds;
    while (fgets(line, sizeof line, stdin) && sscanf(line, "run %lf %3999s", &seconds, path) == 2) {
        sample_count = 0;
        errors = laters = pushes = 0;
        memset(kind_replies, 0, sizeof kind_replies);
        memset(kind_bytes, 0, sizeof kind_bytes);
        uint64_t start = now_ns();
        round_of(seconds);
        double took = (double)(now_ns() - start) / 1e9;
        FILE *out = fopen(path, "wb");
        if (!out || fwrite(samples, sizeof *samples, sample_count, out) != sample_count || fclose(out)) die(path);
        printf("done %zu %.6f %llu %llu %llu %llu |", sample_count, took, (unsigned long long)errors,
               (unsigned long long)laters, (unsigned long long)pushes, (unsigned long long)start);
        for (int k = 0; k < KINDS; k++) {
            if (kind_replies[k]) printf(" %d:%llu:%llu", k, (unsigned long long)kind_replies[k], (unsigned long long)kind_bytes[k]);
        }
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
